"""Units and records of the memory estimates."""

from __future__ import annotations

from dataclasses import dataclass, field

from relax_cli.config.schema import Config

MIB = 1 << 20
GIB = 1 << 30
LIBRARIES = "Python and libraries"
OBJECT_STORE = "object store"
GRADIENTS = "gradients"


@dataclass(frozen=True)
class Precision:
    """Bytes of one number of each kind."""

    name: str
    weights: int
    gradients: int
    master: int
    moments: int
    activations: int


CPU = Precision("fp32 on a CPU", weights=4, gradients=4, master=0, moments=8, activations=4)
GPU = Precision(
    "bf16 on a GPU, with fp32 gradients, master weights and moments",
    weights=2,
    gradients=4,
    master=4,
    moments=8,
    activations=2,
)


def precision_of(config: Config) -> Precision:
    """bf16 with `--device cuda`, fp32 otherwise."""
    return GPU if config.parallel.device == "cuda" else CPU


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one role process in bytes, by purpose."""

    role: str
    ranks: int
    resident: dict[str, int]
    """Held all the time on a CPU; while the role is awake on a GPU."""
    working: dict[str, int]
    """Comes on top while the role works, at most."""
    publishing: dict[str, int]
    """Comes on top while new weights go from the actor to the rollout workers."""
    keeps_freed: bool
    """Whether memory that a phase frees is of no use to the next: on a CPU the allocator keeps most of it in pieces."""
    host: dict[str, int] = field(default_factory=dict)
    """Host memory of a process that works on a GPU, all the time: room for its sleep, offloaded moments."""

    @property
    def base_bytes(self) -> int:
        """What the process needs without a model."""
        return self.resident.get(LIBRARIES, 0)

    @property
    def model_bytes(self) -> int:
        """The model's part of it."""
        return sum(self.resident.values()) - self.base_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of a process that uses a GPU."""
        return sum(self.host.values())

    @property
    def extra_bytes(self) -> int:
        """The most that comes on top."""
        phases = sum(self.working.values()), sum(self.publishing.values())
        return sum(phases) if self.keeps_freed else max(phases)

    @property
    def all_publishing_bytes(self) -> int:
        """What publishing needs in all processes of the role: of the actor's only the first publishes."""
        return sum(self.publishing.values()) * (1 if self.role == "actor" else self.ranks)

    @property
    def peak_bytes(self) -> int:
        """The most that the process needs at a time: of memory on a CPU, of the GPU with `--device cuda`."""
        return self.base_bytes + self.model_bytes + self.extra_bytes


@dataclass(frozen=True)
class Lengths:
    """Longest prompt and response, in tokens."""

    prompt: int
    response: int
    evaluated: int = 0
    """Prompt and response of a held-out set together."""

    @property
    def generated(self) -> int:
        """The longest sequence that an engine makes."""
        return max(self.prompt + self.response, self.evaluated)


def in_bytes(size: int) -> str:
    """A size for people: `6.3 MB`, `1.5 GB`."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1000:.0f} kB"
