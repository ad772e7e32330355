"""Switch that delays every frame by a number of milliseconds; runs inside a lab's switch.

It stands in for the kernel's netem, which not every kernel has. Usage: ``relay.py DELAY_MS PORT [PORT …]``. It prints
"ready", and later the frames that it drops. Frames keep their offload headers, so the kernel's 64 KB frames stay whole.
"""

import contextlib
import ctypes
import os
import select
import socket
import sys
import time
from collections import deque

# linux/if_packet.h, asm-generic/socket.h, linux/prctl.h, linux/if_ether.h
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
PR_SET_TIMERSLACK = 29
ETH_P_ALL = 3
BUFFER_BYTES = 64 << 20
VNET_HDR_BYTES = 10
LARGEST_FRAME_BYTES = 70_000
AT_ONCE = 64  # frames read from a port before the next port's turn


def main():
    delay_s, names = float(sys.argv[1]) / 1e3, sys.argv[2:]
    # By default, sleeps may end 50 µs late.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ports = [opened(name) for name in names]
    number_of = {port: i for i, port in enumerate(ports)}
    waiting = deque()  # (due time, port of arrival, bytes), in order, since the delay is constant
    port_of = {}  # by address, learned from arriving frames
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, (), (), wait_s)[0]:
            take(port, number_of[port], delay_s, waiting)
        while waiting and waiting[0][0] <= time.monotonic():
            _, came_from, frame = waiting.popleft()
            pass_on(frame, came_from, ports, port_of)


def opened(name):
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # receives nothing before it is bound
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (SO_RCVBUFFORCE, SO_SNDBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    port.bind((name, ETH_P_ALL))
    port.setblocking(False)
    return port


def take(port, number, delay_s, waiting):
    due_s = time.monotonic() + delay_s
    for _ in range(AT_ONCE):
        try:
            waiting.append((due_s, number, port.recv(LARGEST_FRAME_BYTES)))
        except BlockingIOError:
            return


def pass_on(frame, came_from, ports, port_of):
    to, sender = frame[VNET_HDR_BYTES : VNET_HDR_BYTES + 6], frame[VNET_HDR_BYTES + 6 : VNET_HDR_BYTES + 12]
    port_of[sender] = came_from
    only = port_of.get(to)
    for i, port in enumerate(ports):
        if i == only or (only is None and i != came_from):
            try:
                port.send(frame)
            except OSError as error:  # the link's queue is full
                print(f"dropped {len(frame)} bytes: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
