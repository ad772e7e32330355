# Login host of a lab, its PID 1, also the switch of the network. Arguments: folder, number of nodes, network.
# For each file boot.I in the folder, it turns on node I.
set -eu
here=$(dirname "$0") lab=$1 num_nodes=$2 net=$3
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run; mkdir -p /run/netns /run/munge /run/lab /run/keep
mount --bind "$lab" /run/lab
# Software that this host hides is put back by own.sh.
i=0; while read -r path; do mkdir /run/keep/$i; mount --bind "$path" /run/keep/$i; i=$((i + 1)); done <"$lab/software"
for file in hosts passwd group resolv.conf; do mount --bind "$lab/$file" "/etc/$file"; done
mount -t tmpfs -o mode=755 tmpfs /root; mount --bind "$lab/home" /home
mkdir -p /etc/slurm; mount --bind "$lab/etc" /etc/slurm
. "$here/own.sh" login
ip link set lo up
ip link add br0 type bridge; ip addr add "$net.1/24" dev br0; ip link set br0 up
munged --force --key-file /run/lab/munge/key --socket /run/munge/munge.socket.2 --pid-file /run/munge/pid \
  --log-file /run/lab/munge/log --seed-file /run/lab/munge/seed
for i in $(seq "$num_nodes"); do
  ip netns add "node$i"
  ip link add "port$i" type veth peer name eth0 netns "node$i"; ip link set "port$i" master br0 up
  ip -n "node$i" link set lo up
  ip -n "node$i" addr add "$net.1$i/24" dev eth0; ip -n "node$i" link set eth0 up
  touch "/run/lab/boot.$i"
done
slurmctld -D -c >/run/lab/slurmctld.log 2>&1 &
touch /run/lab/ready
while :; do
  for file in /run/lab/boot.*; do
    [ -e "$file" ] || continue
    rm "$file"; i=${file##*.}
    ip netns exec "node$i" unshare -m -p -u -i --fork --kill-child bash /run/lab/scripts/node.sh "$i" >>"/run/lab/node$i.log" 2>&1 &
  done
  sleep 0.1
done
