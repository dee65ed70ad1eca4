"""Rows: base models of codes and scales, as the bfloat16 numbers that they are."""

from __future__ import annotations

from typing import Any

from benchmarks import bases, files, ranks, rivals
from benchmarks.commands import OURS, run_command
from benchmarks.contender import Contender, Context, Row, row
from benchmarks.program import Timing

WORLD = 2
PLAIN = "ours, load_model of the same in bfloat16"


class _Sums:
    """Of what is loaded of each kind: all contenders load the same."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}

    def check(self, kind: str, name: str, found: float) -> None:
        wanted = self._of.setdefault(kind, found)
        if found == 0 or found != wanted:
            raise RuntimeError(f"{name} loaded values of sum {found}, not {wanted}")


def _row(
    context: Context,
    title: str,
    names: list[tuple[str, str, str]],
    limit_of: str,
    *,
    world: int = WORLD,
    warm: bool = False,
    core: int | None = None,
) -> Row:
    """names: what a contender is called, its load, and the kind of base."""
    layers = bases.layers_of(context.scale)
    size = bases.size_of(layers)
    paths = {kind: context.directory / kind for _, _, kind in names}
    for kind, path in paths.items():
        bases.make(path, kind, layers)
    sums = _Sums()

    def timed(name: str, load: str, kind: str) -> Timing:
        words = [load, "--layers", str(layers), "--path", str(paths[kind])]
        words += ["--program", str(context.program.path)]
        words += ["--warm"] if warm else []
        words += [] if core is None else ["--core", str(core)]
        answer: dict[str, Any] | None = ranks.run_ranks("benchmarks.bases_rank", [words] * world)[0]
        assert answer is not None
        sums.check(kind, name, answer["sum"])
        return Timing(answer["seconds"], answer["cpu"], size, int(answer["memory"]))

    found = [p for p in files.files_in(paths[limit_of]) if p.suffix == ".safetensors"]
    limit = [] if warm else [rivals.cold_read_limit(context, found)]
    return Row(
        title=title,
        bytes=size,
        tensors=layers,
        contenders=[
            *(
                Contender(
                    name=name,
                    role="ours" if name.startswith("ours") else "rival",
                    run=lambda each=(name, load, kind): timed(*each),  # type: ignore[misc]
                    skip=rivals.why_not_ours("QuantizedHuggingFaceStorageReader"),
                )
                for name, load, kind in names
            ),
            *limit,
        ],
        limit=rivals.COLD_READ if limit else "",
        bound=rivals.READ_BOUND,
        close=lambda: files.empty(context.directory),
    )


@row("bases_fp8", memory=("touched",))
def bases_fp8(context: Context) -> Row:
    """float8 in blocks of 128 x 128."""
    return _row(
        context,
        "A base of float8 and scales for blocks, cold, into bfloat16, FSDP2 on 2 ranks; GB/s and "
        "bytes of bfloat16",
        [
            (bases.OURS, bases.OURS, "fp8"),
            (bases.READER, bases.READER, "fp8"),
            (bases.STOCK, bases.STOCK, "fp8"),
            (PLAIN, bases.OURS, "bf16"),
        ],
        "fp8",
    )


@row("bases_fp4", memory=("touched",))
def bases_fp4(context: Context) -> Row:
    """MXFP4, of which stock's reader of torch 2.13 leaves most out: it is not here."""
    return _row(
        context,
        "A base of MXFP4, cold, into bfloat16, FSDP2 on 2 ranks; GB/s and bytes of bfloat16",
        [(bases.OURS, bases.OURS, "fp4"), (PLAIN, bases.OURS, "bf16")],
        "fp4",
    )


@row("bases_one_core", memory=("touched",))
def bases_one_core(context: Context) -> Row:
    """How fast numbers are made."""
    return _row(
        context,
        "The same bases from the page cache, by one process on one core",
        [
            (f"{bases.OURS} of float8", bases.OURS, "fp8"),
            (f"{bases.OURS} of MXFP4", bases.OURS, "fp4"),
            (PLAIN, bases.OURS, "bf16"),
        ],
        "fp8",
        world=1,
        warm=True,
        core=0,
    )


@row("bases_convert", memory=("touched",))
def bases_convert(context: Context) -> Row:
    """A directory of float8 to one of bfloat16."""
    layers = bases.layers_of(context.scale * 8)
    source, target = context.directory / "source", context.directory / "target"
    bases.make(source, "fp8", layers)
    size = bases.size_of(layers)
    words = [*OURS, "convert", str(source), str(target), "--to", "hf", "--dtype", "bf16", "-q"]

    def check() -> None:
        found = sum(path.stat().st_size for path in files.files_in(target))
        if found < size:
            raise RuntimeError(f"{found} bytes were written, less than {size}")

    return Row(
        title="A base of float8 and scales for blocks to a directory of bfloat16, durable, the "
        "whole command",
        bytes=size,
        tensors=layers,
        contenders=[
            *(
                Contender(
                    name=f"ours, torch-ckpt convert, {where}",
                    role="ours",
                    before=lambda bring=bring: bring(files.files_in(source)),  # type: ignore[misc]
                    run=lambda: run_command(words, size),
                    check=check,
                    after=lambda: files.remove(target),
                    skip=rivals.why_not_ours("convert"),
                )
                for where, bring in (
                    ("read from the page cache", files.bring_into_memory),
                    ("read from the same disk", files.drop_from_memory),
                )
            ),
            rivals.write_limit(context, rivals.FRESH, "direct", size),
        ],
        limit=rivals.FRESH,
        close=lambda: files.empty(context.directory),
    )


def _experts(context: Context, title: str, *, saves: bool) -> Row:
    layers = max(1, round(bases.EXPERT_LAYERS * context.scale))
    models = {
        "one by one": (bases.one_by_one(layers), None),
        "in groups": (bases.in_groups(layers, turned=False), bases.GROUPS),
        "in turned groups": (bases.in_groups(layers, turned=True), bases.TURNED),
    }
    flat = models["one by one"][0]
    tensors = len(list(flat.parameters()))
    size = sum(parameter.nbytes for parameter in flat.parameters())
    source, target = context.directory / "source", context.directory / "target"
    skip = rivals.why_not_ours("save_model")
    if not saves and not skip:
        rivals.ours("save_model")(flat, source)

    def run(name: str) -> None:
        model, pairs = models[name]
        if saves:
            rivals.ours("save_model")(model, target, tensor_mapping=pairs)
        else:
            rivals.ours("load_model")(model, source, tensor_mapping=pairs)

    shards = [p for p in files.files_in(source) if p.suffix == ".safetensors"] if not saves else []
    limit = (
        rivals.write_limit(context, rivals.FRESH, "direct", size)
        if saves
        else rivals.cold_read_limit(context, shards)
    )
    return Row(
        title=title,
        bytes=size,
        tensors=tensors,
        contenders=[
            *(
                Contender(
                    name=f"ours, {'save' if saves else 'load'}_model, {name}",
                    role="ours",
                    before=lambda: None if saves else files.drop_from_memory(shards),
                    run=lambda name=name: run(name),  # type: ignore[misc]
                    after=lambda: files.remove(target),
                    skip=skip,
                )
                for name in models
            ),
            limit,
        ],
        limit=rivals.FRESH if saves else rivals.COLD_READ,
        bound="limit" if saves else rivals.READ_BOUND,
        close=lambda: files.empty(context.directory),
    )


@row("bases_experts_load", memory=("touched",))
def bases_experts_load(context: Context) -> Row:
    """Experts one by one on disk."""
    return _experts(
        context,
        "Experts that are stored one by one, cold, by load_model into a model that has them so, "
        "and by tensor_mapping into groups, and into groups that are transposed; one process",
        saves=False,
    )


@row("bases_experts_save", memory=("touched",))
def bases_experts_save(context: Context) -> Row:
    """And back."""
    return _experts(
        context,
        "The same models by save_model into one by one, durable; one process",
        saves=True,
    )


@row("bases_experts_convert", memory=("touched",))
def bases_experts_convert(context: Context) -> Row:
    """Groups to one by one, which is what the Hub wants of a run."""
    layers = max(1, round(bases.EXPERT_LAYERS * context.scale))
    target = context.directory / "target"
    skip = rivals.why_not_ours("convert")
    jobs = {"as it is": (False, None), "one by one": (False, bases.GROUPS)}
    jobs["transposed, one by one"] = (True, bases.TURNED)
    sources = {turned: context.directory / f"turned-{turned}" for turned in (False, True)}
    size = 0
    for turned, source in sources.items():
        model = bases.in_groups(layers, turned=turned)
        size = sum(parameter.nbytes for parameter in model.parameters())
        if not skip:
            rivals.ours("save_model")(model, source)

    def run(name: str) -> None:
        turned, pairs = jobs[name]
        rivals.ours("convert")(sources[turned], target, "hf", tensor_mapping=pairs)

    return Row(
        title="Experts in groups, cold, by convert into a directory of the same, and by "
        "tensor_mapping of experts one by one; durable, from the disk that is written to",
        bytes=size,
        tensors=layers * bases.EXPERTS * 3,
        contenders=[
            *(
                Contender(
                    name=f"ours, convert, {name}",
                    role="ours",
                    before=lambda name=name: files.drop_from_memory(  # type: ignore[misc]
                        files.files_in(sources[jobs[name][0]])
                    ),
                    run=lambda name=name: run(name),  # type: ignore[misc]
                    after=lambda: files.remove(target),
                    skip=skip,
                )
                for name in jobs
            ),
            rivals.write_limit(context, rivals.FRESH, "direct", size),
        ],
        limit=rivals.FRESH,
        close=lambda: files.empty(context.directory),
    )


@row("bases_experts_plan", memory=("touched",))
def bases_experts_plan(context: Context) -> Row:
    """What a mapping costs before anything is read or written."""
    layers = max(1, round(bases.PLAN_LAYERS * context.scale))
    model = bases.in_groups(layers, turned=True, small=True)
    tensors = layers * bases.EXPERTS * 3
    source = context.directory / "source"
    skip = rivals.why_not_ours("save_model")
    if not skip:
        rivals.ours("save_model")(model, source, tensor_mapping=bases.TURNED)
    return Row(
        title="Planning of a mapping of transposed groups alone: the catalog of a checkpoint as a "
        "model has it, and a model's memory as a checkpoint has it",
        bytes=sum(parameter.nbytes for parameter in model.parameters()),
        tensors=tensors,
        contenders=[
            Contender(
                name=f"ours, {name}",
                role="ours",
                run=lambda plan=plan: plan(model, source),  # type: ignore[misc]
                skip=skip,
            )
            for name, plan in bases.PLANS.items()
        ],
        limit="",
        per_tensor=True,
        close=lambda: files.empty(context.directory),
    )
