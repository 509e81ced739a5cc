"""Keys and values of the positions already seen, so that decoding computes only the new ones."""

from __future__ import annotations

from torch import Tensor


class KVCache:
    """Per layer, keys and values (B, H_kv, capacity, D), of which the first `length` are filled.

    It is handed to `GPT.forward`, which appends to every layer and advances `length` once at the
    end; no module keeps it. Keys are stored rotated: their positions never change. For inference
    (`torch.no_grad`): it is written in place. Memory is taken at the first append.
    """

    def __init__(self, n_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: list[Tensor | None] = [None] * n_layers
        self._values: list[Tensor | None] = [None] * n_layers

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k, v (B, H_kv, T, D) after `length`; return all so far, (B, H_kv, length + T, D).

        Raises ValueError when they do not fit.
        """
        B, H_kv, T, D = k.shape
        end = self.length + T
        if end > self.capacity:
            raise ValueError(f"KV cache: {end} positions do not fit its capacity {self.capacity}")
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            keys = self._keys[layer] = k.new_zeros(B, H_kv, self.capacity, D)
            values = self._values[layer] = v.new_zeros(B, H_kv, self.capacity, D)
        if keys.shape[0] != B:
            raise ValueError(f"KV cache: it holds a batch of {keys.shape[0]}, not of {B}")
        keys.narrow(2, self.length, T).copy_(k)  # indexing by slices takes twice as long
        values.narrow(2, self.length, T).copy_(v)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def advance(self, T: int) -> None:
        """Count T more positions as filled, once every layer has appended its own."""
        self.length += T

    def clear(self) -> None:
        """Forget everything; the memory is kept."""
        self.length = 0
