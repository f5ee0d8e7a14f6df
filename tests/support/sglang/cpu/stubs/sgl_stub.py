"""Stands for `torchvision`, `torchaudio` and `sgl_kernel`, which have no CPU build. Imported by a .pth file."""

import sys
import types

from _dummy import Finder


def _fill(module):
    """The operators of sgl_kernel that a text model really calls on a CPU without AMX."""
    import torch

    def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, width):
        at = 0
        rows, starts, ends = req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
        for row, start, end in zip(rows, starts, ends, strict=True):
            count = end - start
            req_to_token[row, start:end] = out_cache_loc[at : at + count].to(req_to_token.dtype)
            at += count

    def murmur_hash32_cpu(seed, positions, columns):
        """MurmurHash3 x86_32 of (seed low, seed high, position, column), as the Triton kernel."""
        mask = 0xFFFFFFFF

        def mul(a, b):
            lo = (a & 0xFFFF) * b
            hi = ((a >> 16) * b) & 0xFFFF
            return (lo + (hi << 16)) & mask

        def rotl(a, r):
            return ((a << r) | (a >> (32 - r))) & mask

        def mix(h, k):
            k = mul(k, 0xCC9E2D51)
            k = rotl(k, 15)
            k = mul(k, 0x1B873593)
            h = rotl(h ^ k, 13)
            return (mul(h, 5) + 0xE6546B64) & mask

        seed = seed.to(torch.int64)
        low, high = seed & mask, (seed >> 32) & mask
        pos = positions.to(torch.int64) & mask
        h = torch.zeros_like(low)
        h = mix(h, low)
        h = mix(h, high)
        h = mix(h, pos)
        h = mix(
            h[:, None].expand(-1, columns.numel()), (columns.to(torch.int64) & mask)[None, :].expand(low.numel(), -1)
        )
        h = h ^ 16
        h ^= h >> 16
        h = mul(h, 0x85EBCA6B)
        h ^= h >> 13
        h = mul(h, 0xC2B2AE35)
        h ^= h >> 16
        return h.to(torch.uint32)

    library = torch.library.Library("sgl_kernel", "DEF")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
    module._library = library
    # Routed experts are copied to page-locked memory also where there is no GPU.
    torch.cuda.cudart = lambda: types.SimpleNamespace(cudaHostRegister=lambda *_: 0)
    module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu


sys.meta_path.append(Finder({"torchvision": None, "torchaudio": None, "sgl_kernel": _fill}))
