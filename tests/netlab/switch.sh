# The switch: a bridge with a port for each host. Runs as PID 1 of namespaces of its own; the lab ends with it.
# Arguments: a folder for the lab's files, the number of hosts, the first three numbers of their addresses.
set -eu
folder=$1 num_hosts=$2 net=$3
here=$(dirname "$0")
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mkdir /run/netns
mount --bind "$folder/hosts" /etc/hosts
hostname switch
ip link set lo up
ip link add br0 type bridge
ip link set br0 up
for i in $(seq 0 $((num_hosts - 1))); do
    ip netns add "host$i"
    ip link add "port$i" type veth peer name eth0 netns "host$i"
    ip link set "port$i" master br0 up
    ip -n "host$i" link set lo up
    ip -n "host$i" addr add "$net.1$i/24" dev eth0
    ip -n "host$i" link set eth0 up
    # Nobody is there: with it a host finds out which of its addresses others see.
    ip -n "host$i" route add default via "$net.254"
    ip netns exec "host$i" unshare -p -m -u -i --fork --kill-child bash "$here/host.sh" "$folder" "$i" &
done
touch "$folder/switch.ready"
sleep infinity  # reaps meanwhile
exit
