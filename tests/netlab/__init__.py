"""Network of hosts on one Linux machine: namespaces as hosts, links between them with a rate and a delay.

    if (why := why_not()) is None:
        with Lab(2) as lab:
            lab.shape(Shape(rate_bit_per_s=100e6, delay_s=0.001))
            lab.run(0, ["python", "-c", "…"])

Every host has a network (eth0), process table, host name, /run and /dev/shm; files are the machine's. The network is
isolated. `Lab(2, with_ssh=True)` makes hosts with an SSH daemon and a home each. Everything ends with the `Lab`, or
with the process that made it, even if it is killed.
"""

from netlab.lab import Lab
from netlab.requirements import why_not
from netlab.shape import Shape
from netlab.ssh import why_no_ssh

__all__ = ["Lab", "Shape", "why_no_ssh", "why_not"]
