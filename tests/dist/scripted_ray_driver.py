"""Replace `negamax.engine.nodes.ray_driver`; the name of the model selects the behaviour."""

import os
import sys

import msgspec

from negamax.base import env
from negamax.engine.nodes.ray_launcher import Failed, Placed
from negamax.options.engine import EngineOptions
from negamax.options.nodes import KEY_VARIABLE


def main(fd: int) -> None:
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineOptions)
    key = env.get(KEY_VARIABLE) or ""
    placed = Placed(2, "cuda", "10.0.0.1", "eth0", {"CUDA_VISIBLE_DEVICES": "2,3", "KEY": key})
    dies = [placed, Failed("node 1 (far): it does not fit", 2)]
    no_room = [Failed("Ray has no room", 2)]
    scripts = {"placed": [placed], "dies": dies, "no room": no_room, "silent": []}
    words = scripts.get(options.model)
    if words is None:
        return
    for word in words:
        os.write(fd, msgspec.json.encode(word) + b"\n")
    while os.read(0, 4096):
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
