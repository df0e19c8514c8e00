"""The checkpoints of a run as files have them: names, shapes, and one tensor at a time.

Formats: safetensors (one file, or shards with an index), torch.save (read with weights_only, one
file or shards with an index), and PyTorch's distributed checkpoints.  Nothing in a checkpoint is
ever executed.
"""

from __future__ import annotations

import abc
import json
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

METADATA = ".metadata"  # Of a distributed checkpoint; written when all ranks are done.
SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Files beside the weights that end like them.
_OTHER_FILES = re.compile(
    r"(optimizer|scheduler|rng_state|training_args|scaler|random_states|zero_pp_rank|optim_)"
)
_STATES = ("state_dict", "model_state_dict", "model", "module")
_CONFIGS = ("model_args", "hyper_parameters", "config", "model_config", "args")
_STEPS = ("global_step", "step", "iter_num", "iteration", "iter", "train_step", "current_step")
_STEP_IN_NAME = re.compile(
    r"(?:step|iter(?:ation)?|checkpoint|ckpt|update)s?[-_=]?(\d+)", re.IGNORECASE
)


class Unreadable(RuntimeError):
    """This checkpoint cannot be read, perhaps not yet; the text says which and why."""


class Checkpoint(abc.ABC):
    """One checkpoint, open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}  # Of the model's tensors.
        self.config: dict[str, Any] = {}  # What the checkpoint itself tells of the model.
        self.step: Optional[int] = None  # As told inside it.

    @abc.abstractmethod
    def tensor(self, name: str) -> Tensor:
        """One of `shapes`.  Raises Unreadable."""


def _reading(path: Path, error: BaseException) -> Unreadable:
    text = str(error).strip().splitlines()
    return Unreadable(f"{path}: {type(error).__name__}: {text[0] if text else 'no reason given'}")


# ---- safetensors ----


class _SafeTensors(Checkpoint):
    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        super().__init__(path)
        try:
            from safetensors import safe_open
        except ImportError:
            raise Unreadable(f"{path}: it takes the package safetensors (pip install)") from None
        self._open: dict[str, Any] = {}
        for file in files:
            try:
                opened: Any = safe_open(file, framework="pt")
                for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                    self._open[name] = opened
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())
                told = opened.metadata() or {}
            except Exception as e:  # The library has an error class of its own.
                raise _reading(file, e) from e
            self.step = self.step if self.step is not None else _step_in(told)

    def tensor(self, name: str) -> Tensor:
        try:
            found: Tensor = self._open[name].get_tensor(name)
        except Exception as e:
            raise _reading(self.path, e) from e
        return found


# ---- torch.save ----


def _flat(state: dict[Any, Any], prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, dict) and not str(key).startswith("optim"):
            found.update(_flat(value, f"{prefix}{key}."))
    return found


def _number(value: Any) -> Optional[int]:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        return None
    return int(value) if value >= 0 else None


def _step_in(content: dict[Any, Any]) -> Optional[int]:
    return next((n for n in (_number(content.get(key)) for key in _STEPS) if n is not None), None)


class _TorchSaved(Checkpoint):
    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        super().__init__(path)
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            content = self._load(file)
            if not isinstance(content, dict):
                raise Unreadable(f"{file}: it holds a {type(content).__name__}, no state_dict")
            state = next((content[k] for k in _STATES if isinstance(content.get(k), dict)), content)
            self._tensors.update(_flat(state))
            for key in _CONFIGS:
                if isinstance(content.get(key), dict):
                    self.config.update(content[key])
            self.step = self.step if self.step is not None else _step_in(content)
        self.shapes = {name: tuple(t.shape) for name, t in self._tensors.items()}

    @staticmethod
    def _load(file: Path) -> Any:
        try:
            try:
                return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as e:
                if "mmap" not in str(e):  # Files of before 2020 cannot be mapped.
                    raise
                return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as e:
            if "Weights only load failed" in str(e):
                raise Unreadable(
                    f"{file}: it holds more than tensors and plain values, which is never executed "
                    "here (torch.load with weights_only=True refuses it)"
                ) from e
            raise _reading(file, e) from e
        except (RuntimeError, EOFError, OSError, ValueError, KeyError) as e:
            raise _reading(file, e) from e

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


# ---- distributed checkpoints ----

_METADATA_HOMES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.hf_storage",
)
_METADATA_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}


class _PlainMetadata(pickle.Unpickler):
    """Takes what DCP writes into .metadata and nothing that could do something else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        found: Any = None
        if module == "torch":
            found = getattr(torch, name, None)
        elif module in _METADATA_HOMES:
            found = super().find_class(module, name)
        own_class = isinstance(found, type) and found.__module__ == module
        if not own_class and not isinstance(found, torch.dtype):
            raise pickle.UnpicklingError(f"{module}.{name} has no business in a {METADATA}")
        return found


class _Distributed(Checkpoint):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        try:
            with open(path / METADATA, "rb") as file:
                metadata = _PlainMetadata(file).load()
            entries = dict(metadata.state_dict_metadata)
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as e:
            raise _reading(path / METADATA, e) from e

        class Reader(FileSystemReader):
            def read_metadata(self, *_: Any, **__: Any) -> Any:
                return metadata

        self._reader = Reader(path)
        self._types: dict[str, torch.dtype] = {}
        for name, entry in entries.items():
            if isinstance(entry, TensorStorageMetadata) and not name.startswith("optim"):
                self.shapes[name] = tuple(entry.size)
                self._types[name] = entry.properties.dtype
        for name in [n for n, shape in self.shapes.items() if not shape]:
            if name.rpartition(".")[2] in _STEPS and self.step is None:
                self.step = _number(self.tensor(name))

    def tensor(self, name: str) -> Tensor:
        from torch.distributed.checkpoint.state_dict_loader import load

        wanted = {name: torch.empty(self.shapes[name], dtype=self._types[name])}
        try:
            load(wanted, storage_reader=self._reader, no_dist=True)
        except Exception as e:  # DCP wraps what went wrong in a class of its own.
            raise _reading(self.path, e.__cause__ or e) from e
        return wanted[name]


# ---- what lies in a folder ----


def _weights_in(folder: Path) -> list[Path]:
    """The files of a folder that is one checkpoint in the way of Hugging Face; else none."""
    for index in _INDICES:
        if (folder / index).is_file():
            try:
                names = set(json.loads((folder / index).read_text())["weight_map"].values())
            except (ValueError, KeyError, AttributeError, OSError) as e:
                raise _reading(folder / index, e) from e
            return [folder / index, *(folder / str(name) for name in sorted(names))]
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
    return []


def is_checkpoint(path: Path) -> bool:
    if path.is_dir():
        names = (METADATA, *_INDICES, "model.safetensors", "pytorch_model.bin")
        return any((path / name).is_file() for name in names)
    return path.suffix in SUFFIXES and not _OTHER_FILES.match(path.name)


def find(directory: Path) -> list[Path]:
    """The checkpoints in a folder, or the folder itself if it is one; links are followed once."""
    if is_checkpoint(directory):
        return [directory]
    found: dict[Path, Path] = {}
    for entry in sorted(directory.iterdir()):
        if not entry.name.startswith(".") and is_checkpoint(entry):
            real = entry.resolve()
            if real not in found or found[real].is_symlink():
                found[real] = entry
    return list(found.values())


def signature(path: Path) -> str:
    """Changes whenever a file of the checkpoint does: names, sizes and times of change.  Raises
    OSError if it is gone."""
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    parts = []
    for file in files:
        told = file.stat()
        parts.append(f"{file.name}:{told.st_size}:{told.st_mtime_ns}")
    return "|".join(parts)


def step_of_name(path: Path) -> Optional[int]:
    """The number behind a word such as "step" or "checkpoint", else the last number there is."""
    name = path.name if path.is_dir() else path.stem
    told = _STEP_IN_NAME.findall(name) or re.findall(r"\d+", name)
    return int(told[-1]) if told else None


def _step_of_trainer(folder: Path) -> Optional[int]:
    try:
        return _step_in(json.loads((folder / "trainer_state.json").read_text()))
    except (OSError, ValueError, AttributeError):
        return None


def read(path: Path) -> Checkpoint:
    """Opens it.  Raises Unreadable for what is damaged or not written to its end."""
    checkpoint: Checkpoint
    if path.is_dir() and (path / METADATA).is_file():
        checkpoint = _Distributed(path)
    else:
        files = _weights_in(path) if path.is_dir() else [path]
        missing = [file for file in files if not file.is_file()]
        if missing or not files:
            raise Unreadable(f"{missing[0] if missing else path}: it is not there (yet)")
        weights = [file for file in files if file.suffix != ".json"]
        kind = _SafeTensors if weights[0].suffix == ".safetensors" else _TorchSaved
        checkpoint = kind(path, weights)
    if path.is_dir() and checkpoint.step is None:
        checkpoint.step = _step_of_trainer(path)
    if not checkpoint.shapes:
        raise Unreadable(f"{path}: there is no tensor in it")
    return checkpoint


def step_of(checkpoint: Checkpoint) -> int:
    """The optimizer step that it was saved at.  Raises Unreadable if nothing tells it."""
    path = checkpoint.path
    name = path.name if path.is_dir() else path.stem
    step = step_of_name(path) if _STEP_IN_NAME.search(name) else None
    step = checkpoint.step if step is None else step
    step = step_of_name(path) if step is None else step
    if step is None:
        raise Unreadable(
            f"{path}: neither its name nor its content ({', '.join(_STEPS)}) tells its step"
        )
    return step
