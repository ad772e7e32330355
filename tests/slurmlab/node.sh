# Compute node of a lab, its PID 1. Argument: its number.
set -eu
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o size=2g tmpfs /dev/shm; chmod 1777 /dev/shm
. /run/lab/scripts/own.sh "node$1"
slurmd -D >"/run/lab/slurmd$1.log" 2>&1 &
while :; do sleep 0.5; done  # reaps
