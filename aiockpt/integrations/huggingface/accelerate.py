"""An Accelerator that saves and loads with aiockpt: its ``save_state`` and ``load_state`` are replaced.

accelerate's own hooks do not cover the optimizer. Objects that are prepared, or registered for checkpointing, go into the
state unchanged; the loop stays as it is.
"""

from __future__ import annotations

import atexit
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import aiockpt
from aiockpt.errors import BackgroundSaveError, RankError, UsageError
from aiockpt.format.names import split_name
from aiockpt.integrations.contract import (
    MethodCall,
    Replacements,
    ask_first_rank,
    begin_save,
    resume_newest,
    valid_steps,
)
from aiockpt.integrations.huggingface.accelerate_state import LoopState
from aiockpt.integrations.huggingface.engine_inside import EngineInside
from aiockpt.integrations.huggingface.overrides import Overrides
from aiockpt.integrations.huggingface.state_folders import (
    Mark,
    StateFolders,
    check_folder,
    is_of_accelerate,
    read_mark,
)

_RESTORED = 8
"""Number of newest steps that may lack their folder after a kill; more than the saves that can be in progress."""
_REFUSED = {"MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}
_TOGETHER = "call it on every process, or let that one save by itself: attach(accelerator, ranks=aiockpt.Ranks())"


def attach(
    accelerator: Any, place: Any = None, *, delete_with_folder: bool = False, **options: Any
) -> aiockpt.Checkpointer:
    """Make *accelerator* save and load with aiockpt; return the checkpointer that it uses.

    ``save_state(folder)`` returns when the state is copied; *folder* appears when its step is committed. ``load_state()``
    loads the newest valid step and does nothing where there is none; ``load_state(folder)`` loads the step of a folder, or
    accelerate's own checkpoint in it. The next loop over a prepared loader resumes where the run was killed. Every rank
    calls *attach*, before or after ``prepare()``.

    Args:
        accelerator: of ``accelerate``.
        place: the place to save to, as for `aiockpt.Checkpointer`; None is ``project_dir/aiockpt``.
        delete_with_folder: whether a step is deleted when its folder was deleted, and a newer one is committed.
        **options: of `aiockpt.Checkpointer`.

    Raises:
        UsageError: something else writes the checkpoints of this Accelerator (Megatron-LM, XLA), or there is
            no place.
    """
    kind = accelerator.distributed_type.name
    if kind in _REFUSED:
        raise UsageError(f"attach(): {_REFUSED[kind]} writes the checkpoints of this Accelerator")
    if place is None and accelerator.project_dir is None:
        raise UsageError(
            "attach(): name a place, attach(accelerator, 'runs/7'), or make Accelerator(project_dir='runs/7')"
        )
    ckpt = aiockpt.Checkpointer(place or Path(accelerator.project_dir) / "aiockpt", **options)
    folders = StateFolders(accelerator, ckpt, delete_with_folder=delete_with_folder)
    _AttachedAccelerator(accelerator, ckpt, folders, options).replace_methods()
    return ckpt


class _AttachedAccelerator:
    """The replacements of the Accelerator's methods."""

    def __init__(
        self, accelerator: Any, ckpt: aiockpt.Checkpointer, folders: StateFolders, options: dict[str, Any]
    ) -> None:
        self._accelerator = accelerator
        self._ckpt = ckpt
        self._folders = folders
        exclude, ranks = options.get("exclude"), options.get("ranks")
        self._only = options.get("only")
        self._exclude = [exclude] if isinstance(exclude, str) else list(exclude or ())
        self._replacements = Replacements(accelerator)
        self._theirs: Any = import_module("accelerate").Accelerator
        self._overrides = Overrides(accelerator, self._theirs, ("save_state", "load_state"))
        self._inside = EngineInside(accelerator, self._replacements)
        self._loop = LoopState(accelerator, self._inside)
        self._next = 0
        self._has_loaded = False
        self._alone = ranks is not None and ranks.world_size == 1 and ranks.load_group is None

    def replace_methods(self) -> None:
        """Replace the methods, and list the existing steps."""
        accelerator, put = self._accelerator, self._replacements.put
        ours: dict[str, Callable[..., Any]] = {"save_state": self._save_state, "load_state": self._load_state}
        self._overrides.put_below(accelerator, ours)
        for name in self._overrides.passed_over:
            self._replacements.set(accelerator, name, ours[name])
        self._overrides.log_passed_over()
        put(accelerator, "prepare_data_loader", self._prepare_data_loader)
        put(accelerator, "skip_first_batches", self._skip_first_batches, ("dataloader", "num_batches"))
        put(accelerator, "end_training", self._end_training)
        put(accelerator, "backward", self._backward)
        put(accelerator.gradient_state, "_add_dataloader", self._add_dataloader, ("dataloader",))
        for loader in accelerator._dataloaders:
            self._loop.position(loader)
        valid_steps(self._ckpt)  # commits what a dead job has written completely
        steps = self._ckpt.steps().result()
        self._folders.restore([info for info in reversed(steps[:_RESTORED]) if info.problem is None])
        self._next = max((info.step for info in steps), default=-1) + 1
        accelerator.wait_for_everyone()
        atexit.register(self._folders.publish)  # the saves are committed by then

    # ------------------------------------------------------------------ the data

    def _prepare_data_loader(self, call: MethodCall) -> Any:
        loader = call()
        self._loop.position(loader)
        return loader

    def _skip_first_batches(self, call: MethodCall) -> Any:
        position = self._loop.position_of(call.get("dataloader"))
        if position is None:
            return call()
        return position.follow(
            lambda loader, count: call(dataloader=loader, num_batches=count), call.get("num_batches", 0)
        )

    def _add_dataloader(self, call: MethodCall) -> None:
        """Register a new loop, also one over a loader that a function of accelerate has made from a prepared one."""
        any(one.recognise(call.get("dataloader")) for one in self._loop.positions())
        call()

    def _check_seen(self) -> None:
        active = self._accelerator.gradient_state.active_dataloader
        if active is not None and any(one.is_read_unseen(active) for one in self._loop.positions()):
            raise UsageError(
                "save_state(): the batches that this loop has read are unknown: make its loader by "
                "accelerator.prepare(…), or accelerator.skip_first_batches(…) of a prepared one"
            )

    # ------------------------------------------------------------------ saving

    def _save_state(self, output_dir: Any = None, safe_serialization: bool = True, **others: Any) -> Path:
        """Save; return the folder that will stand for the step. When it returns, the state may change."""
        if others:
            raise UsageError(
                f"save_state(): {', '.join(others)}: meant for a writer that aiockpt has taken the place of"
            )
        self._check_seen()
        settings = self._accelerator.project_configuration
        named = self._folder(output_dir)
        folder = named.absolute()  # the program may change its directory until the commit
        self._folders.rotate()
        staged = self._folders.stage(folder, self._next)
        left_out = self._call_save_hooks(staged)
        mark = Mark(self._next, uuid.uuid4().hex)
        user = {"folder": str(folder), "key": mark.key}
        state = self._loop.build(self._next + 1, settings.iteration + 1)
        left_out = [*self._exclude, *left_out]

        def expect(future: aiockpt.SaveFuture) -> None:
            self._next += 1
            settings.iteration += 1
            self._folders.expect(folder, mark, future)

        if "save_state" in self._overrides.called:
            folder.mkdir(parents=True, exist_ok=True)  # an override of any rank may write into it when this returns
        with self._advising():
            begin_save(
                lambda: self._ckpt.save(self._next, state, user=user, only=self._only, exclude=left_out or None), expect
            )
        return named

    @contextmanager
    def _advising(self) -> Iterator[None]:
        """Add to the error of a save that other ranks have not joined what a script may have done."""
        try:
            yield
        except BackgroundSaveError as error:
            lone = any(isinstance(failed.exception(), RankError) for failed in error.failures)
            if lone and self._accelerator.is_main_process:
                error.add_note(f"If save_state() was called on the main process alone: {_TOGETHER}")
            raise

    def _folder(self, output_dir: Any) -> Path:
        settings, root = self._accelerator.project_configuration, self._folders.root
        if root is None:
            if output_dir is None:
                raise UsageError("save_state(): name a folder, or set automatic_checkpoint_naming")
            return Path(output_dir).expanduser()
        folder = root / f"checkpoint_{settings.iteration}"
        if folder.exists() and not self._has_loaded and self._is_of_this_place(folder):
            raise ValueError(
                f"{folder} exists from an earlier run: resume from it by load_state(), or set "
                "project_configuration.iteration to a number that is free"
            )
        return folder

    def _is_of_this_place(self, folder: Path) -> bool:
        mark = read_mark(folder)
        return mark is None or any(info.step == mark.step for info in self._ckpt.steps().result())

    def _call_save_hooks(self, staged: Path) -> list[str]:
        """Call the hooks, which write into the folder; return the names of the models that they have removed."""
        accelerator = self._accelerator
        hooks = list(accelerator._save_model_state_pre_hook.values())
        if not hooks:
            return []
        if not self._alone:
            accelerator.wait_for_everyone()
        names = dict(self._loop.models())
        weights = [accelerator.get_state_dict(model, unwrap=False) for model in names.values()]
        before = list(weights)
        for hook in hooks:
            hook(accelerator._models, weights, str(staged))

        def kept() -> list[bool]:
            left = [any(one is other for other in weights) for one in before]
            # What a hook has put in the place of a model's weights stands for that model, too.
            return left if sum(left) == len(weights) else [True] * len(left)

        # Hooks often remove them on the first rank alone.
        stay = kept() if self._alone else ask_first_rank(kept)
        return [name for name, stays in zip(names, stay, strict=True) if not stays]

    # ------------------------------------------------------------------ loading

    def _load_state(self, *args: Any, **named: Any) -> None:
        """Load the step of a folder, or the newest valid one; accelerate loads its own checkpoints."""
        self._folders.wait()
        self._accelerator.wait_for_everyone()
        theirs = self._overrides.passed_over.get("load_state", partial(self._theirs.load_state, self._accelerator))
        call = MethodCall(theirs, ("input_dir", "load_kwargs"), args, named)
        input_dir, strict = call.get("input_dir"), named.get("strict", True)
        folder = None if input_dir is None else Path(input_dir).expanduser()
        if folder is not None and not folder.is_dir():
            raise ValueError(f"Tried to find {folder} but folder does not exist")
        newest = folder or next((folder for _, folder in self._folders.numbered()), None)
        if newest is not None and is_of_accelerate(newest):
            call(input_dir=str(newest))
            self._folders.number_after_theirs()
            self._has_loaded = True
        elif folder is not None:
            self._load(check_folder(self._ckpt, folder), folder, strict)
        else:
            self._load_newest(strict)

    def _load_newest(self, strict: bool) -> None:
        def load(step: int) -> None:
            user: Any = self._ckpt.describe(step).result().user
            if not isinstance(user, dict) or "folder" not in user:
                raise UsageError(
                    f"load_state(): step {step} of {self._ckpt!r} was not saved by save_state(): load it into your objects "
                    "by the checkpointer that attach() returns, or attach() to another place"
                )
            self._load(step, self._folders.of_step(step, user), strict)

        steps = valid_steps(self._ckpt)
        ask_first_rank(partial(self._folders.check_newest, steps))
        resume_newest(self._ckpt, load, steps)

    def _load(self, step: int, folder: Path, strict: bool) -> None:
        accelerator = self._accelerator
        models = list(accelerator._models)
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(models, str(folder))
        state = self._loop.build(0, 0) | {"rank": aiockpt.per_rank(None)}
        saved = self._ckpt.describe(step).result()
        values: Any = saved.values
        theirs = [name for name, one in self._loop.models() if all(one is not left for left in models)]
        there = {split_name(name)[0] for name in (*(tensor.name for tensor in saved.tensors), *saved.alias)}
        lacking = [name for name, one in self._loop.models() if name not in {*theirs, *there} and [*one.parameters()]]
        if lacking and strict and self._only is None and not self._exclude:
            raise UsageError(
                f"load_state(): a hook of save has removed {', '.join(lacking)} from the weights of step {step}: load it by "
                "register_load_state_pre_hook(…), whose hook removes it from the models, or give strict=False"
            )
        if values["accelerate"]["registered"] != len(accelerator._custom_objects):
            raise UsageError(
                f"load_state(): {values['accelerate']['registered']} objects were registered for checkpointing when step "
                f"{step} was saved, and here are {len(accelerator._custom_objects)}: register the same ones"
            )
        same_ranks = values["accelerate"]["ranks"] == accelerator.num_processes
        left_out = {*theirs, *(() if same_ranks else ("rank",)), *({"scaler"} - set(values))}
        loose = {} if strict else {name: False for name, _ in self._loop.models()}
        if self._inside.engine is not None:
            left_out |= self._inside.keys
            self._inside.load_step(self._ckpt, step, strict=strict)
        self._ckpt.load(
            state, step, only=[name for name in state if name not in left_out], strict=loose or True
        ).result()
        # Steps after the loaded one are those of other folders, and stay.
        self._next = max(self._next, self._loop.go_on(state, same_ranks))
        self._folders.number_after_theirs()
        self._has_loaded = True

    # ------------------------------------------------------------------ the end

    def _backward(self, call: MethodCall) -> Any:
        """Publish the folders of saves committed since the last batch."""
        done = call()
        self._loop.training.backward_count += 1
        self._folders.publish()
        return done

    def _end_training(self, call: MethodCall) -> Any:
        """End when all saves are committed; raise errors."""
        with self._advising():
            self._folders.wait()
        self._folders.rotate()
        return call()
