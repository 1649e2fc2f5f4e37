import ast
import importlib.util
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from negamax.images.sizes import fit
from tests.image_support import decode, draw, encode


def load_smart_resize() -> Callable[..., tuple[int, int]]:
    """Return the resize function of transformers' processor without importing torchvision."""
    name = "transformers.models.minimax_m3_vl"
    folder = importlib.util.find_spec(name)
    assert folder is not None and folder.submodule_search_locations is not None
    file = Path(folder.submodule_search_locations[0]) / "image_processing_minimax_m3_vl.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named = [one for one in tree.body if getattr(one, "name", "") == "smart_resize"]
    found: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(named, []), str(file), "exec"), found)
    return found["smart_resize"]  # type: ignore[no-any-return]


def test_area_rule_has_the_sizes_of_transformers() -> None:
    smart_resize = load_smart_resize()
    noise = random.Random(3)
    for _ in range(10_000):
        height = int(2 ** noise.uniform(0, 13))
        width = min(int(height * 2 ** noise.uniform(-7.6, 7.6)) + 1, 8192)
        expected = smart_resize(height, width, min_pixels=3136, max_pixels=451_584)
        assert fit(height, width, rule="area") == expected, (height, width)


def test_pixels_of_40_sizes_are_close_to_those_of_transformers() -> None:
    """Compare with torch's resizing of uint8, which transformers uses through torchvision. Both
    round after each direction, so a few values may differ by two.
    """
    noise = random.Random(4)
    for number in range(40):
        image = draw(noise.randint(9, 900), noise.randint(9, 900))
        if number % 2:
            image = Image.frombytes("RGB", image.size, noise.randbytes(3 * math.prod(image.size)))
        ours = decode(encode(image), rule="area")
        source = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        size = ours.height, ours.width
        theirs = torch.nn.functional.interpolate(source, size, mode="bicubic", antialias=True)
        off = np.abs(np.asarray(ours).astype(int) - theirs[0].permute(1, 2, 0).numpy())
        assert off.max() <= 2 and (off > 1).mean() < 1e-4, image.size


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "P"])
def test_conversion_to_rgb_is_that_of_transformers(mode: str) -> None:
    """Convert an image whose sides are multiples of 28, so that it is not resized."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21):
        pytest.skip(f"transformers {transformers.__version__} converts images in another way")
    image = draw(112, 56, mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    ours = np.asarray(decode(encode(image), rule="area"))
    theirs = np.asarray(convert_to_rgb(image))
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= (1 if "A" in mode else 0)
