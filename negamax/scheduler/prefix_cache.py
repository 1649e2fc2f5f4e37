"""Compute the hashes by which the prefix cache finds full blocks that requests share.

The KV of a token depends on all earlier tokens. The hash of a block therefore covers the previous
block's hash, the block's tokens, and the digest and position of each image that overlaps the block.
The first block's hash also covers the request's cache salt, so requests with different salts never
share blocks.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from negamax.scheduler.blocks import BlockPool
from negamax.scheduler.request import ImageInput

HASH_BYTES = 32  # 32 bytes give 128 bits of security against deliberate collisions


class BlockHashes:
    """Hashes of a sequence's full blocks, computed on demand. The list `tokens` may grow later."""

    __slots__ = ("_hashes", "_images", "_root", "_tokens", "block_size", "salt")

    def __init__(
        self, tokens: list[int], *, block_size: int, salt: str, images: Sequence[ImageInput] = ()
    ) -> None:
        self._tokens, self._images = tokens, images
        self.block_size = block_size
        self.salt = salt
        self._root = blake2b(
            salt.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, person=b"prefix salt"
        ).digest()
        self._hashes: list[bytes] = []

    def __getitem__(self, index: int) -> bytes:
        """Return the hash of block `index`, whose tokens must all be known."""
        hashes = self._hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            block_tokens = self._tokens[start : start + self.block_size]
            assert len(block_tokens) == self.block_size
            parent = hashes[-1] if hashes else self._root
            content = parent + array("q", block_tokens).tobytes()
            if self._images:
                content += self._describe_images(start)
            hashes.append(blake2b(content, digest_size=HASH_BYTES).digest())
        return hashes[index]

    def _describe_images(self, start: int) -> bytes:
        """Return the digest and position of each image in the block that begins at `start`."""
        stop = start + self.block_size
        return b"".join(
            image.digest + array("q", [start - image.offset, len(image.digest)]).tobytes()
            for image in self._images
            if image.offset < stop and start < image.end
        )

    def computed(self, first: int, stop: int) -> list[bytes]:
        """Return the hashes of blocks `first` to `stop`, which must already be computed."""
        return self._hashes[first:stop]

    def tokens(self, first: int, stop: int) -> list[int]:
        """Return the tokens of blocks `first` to `stop`."""
        return self._tokens[first * self.block_size : stop * self.block_size]


def match_prefix(pool: BlockPool, block_hashes: BlockHashes, *, max_blocks: int) -> list[int]:
    """Return the longest prefix in which all blocks are indexed, at most `max_blocks` blocks."""
    block_ids: list[int] = []
    for index in range(max_blocks):
        block_id = pool.find(block_hashes[index])
        if block_id is None:
            break
        block_ids.append(block_id)
    return block_ids
