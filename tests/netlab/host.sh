# PID 1 of a host, whose network is there already. Arguments: the lab's folder, the host's number.
set -eu
folder=$1 host=$2
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t tmpfs -o size=1g tmpfs /dev/shm
hostname "node$host"
touch "$folder/host$host.ready"
sleep infinity  # reaps meanwhile
exit
