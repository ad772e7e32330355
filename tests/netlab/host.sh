# PID 1 of a host, whose network is there already. Arguments: the lab's folder, the host's number.
set -eu
folder=$1 host=$2
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t tmpfs -o size=1g tmpfs /dev/shm
mkdir -p -m 1777 /tmp/.raypar-locks # of its cores
mount -t tmpfs -o mode=1777 tmpfs /tmp/.raypar-locks
hostname "node$host"
if [ -d "$folder/node$host" ]; then # one to log in to
    mkdir -p /run/sshd /tmp/ray
    mount --bind "$folder/node$host/ray" /tmp/ray
    mount --bind "$folder/node$host/passwd" /etc/passwd
    mount --bind "$folder/resolv.conf" /etc/resolv.conf
    /usr/sbin/sshd -D -e -f "$folder/sshd_config" 2>"$folder/node$host/sshd.log" &
    until (: </dev/tcp/127.0.0.1/22) 2>/dev/null; do sleep 0.05; done
fi
touch "$folder/host$host.ready"
sleep infinity  # reaps meanwhile
exit
