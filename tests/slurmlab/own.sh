# Sourced by each host: its name, and what it has for itself, /tmp and Slurm's state. Argument: its name.
mkdir -p "/run/lab/$1/tmp" "/run/lab/$1/spool"; chmod 1777 "/run/lab/$1/tmp"
mkdir -p /var/spool/slurm; mount --bind "/run/lab/$1/spool" /var/spool/slurm; mkdir -p /var/spool/slurm/ctld /var/spool/slurm/d
mount --bind "/run/lab/$1/tmp" /tmp
i=0; while read -r path; do mkdir -p "$path"; mount --bind "/run/keep/$i" "$path"; i=$((i + 1)); done </run/lab/software
hostname "$1"
