"""Train, lose a rank in the middle of a save, go on with half of them, verify, compare."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import checkpoints
import click
import phases
import torch
import transformers
import verify
from corpus import TEXT_FILE, build_tokenizer, read_tokens
from launch import DemoError, Job
from report import Report, megabytes
from rich.console import Console
from settings import FULL, QUICK, Settings
from speed import OURS, STOCK
from worker import REFERENCE_FILE

_PROMPT = "Alice was "


def prepare(settings: Settings, work: Path, report: Report) -> None:
    """Writes what all processes read: the settings and the tokenizer."""
    report.heading("The text and its tokenizer")
    settings.write(work / "settings.json")
    tokenizer = build_tokenizer(settings.vocabulary)
    tokenizer.save_pretrained(work / "tokenizer")
    tokens = read_tokens(tokenizer).numel()
    report.note(
        f"{TEXT_FILE.name}: {TEXT_FILE.stat().st_size:,} bytes, {tokens:,} tokens; "
        f"tokenizer with {len(tokenizer)} entries made from it."
    )


def train(settings: Settings, work: Path, report: Report) -> dict[str, Any]:
    """Runs the three trainings and checks what they prove; returns figures for the JSON file."""
    before, after = settings.world_before, settings.world_after
    root = work / "checkpoints"

    report.heading(f"An unbroken run on {before} processes, without any save, to compare with")
    reference = phases.unbroken(settings, work, report)

    report.heading(f"The same run with saves, which loses one of its {before} processes in one")
    job, loss = phases.lost(settings, work, root, report)
    report.note(
        f"SIGKILL to rank {before - 1} while step {loss.step} was being saved "
        f"({megabytes(loss.size)} of about {megabytes(loss.expected)} in staging); training had "
        f"done step {loss.trained}. The other ranks ended {loss.ended:.1f} s later."
    )
    report.check(
        "the interrupted save does not count",
        not loss.committed,
        f"{checkpoints.directory_of(root, loss.step).name} has no {checkpoints.COMMIT_MARK}; "
        f"the newest whole checkpoint is {loss.resume_from.name}",
    )
    whole = verify.compare_losses(phases.steps_of(reference), phases.steps_of(job))
    report.check(
        "saving does not change the training",
        whole.largest_difference == 0.0,
        f"losses of steps {whole.first} to {whole.last} equal the unbroken run's exactly",
    )

    report.heading(f"Resumed on {after} processes from {loss.resume_from.name}")
    later = phases.resumed(settings, work, root, report)
    compared = check_resume(settings, reference, later, loss, report)
    left = checkpoints.left_behind(root)
    again = loss.step in {event["step"] for event in later.find("saved")}
    report.check(
        "nothing is left of the interrupted save",
        not left and again,
        f"{checkpoints.directory_of(root, loss.step).name} was saved again, "
        f"{len(left)} staging directories remain",
    )
    kept = [checkpoints.step_of(directory) for directory in checkpoints.whole(root)]
    report.check(
        "the directory keeps the last checkpoints",
        kept == list(range(settings.steps, 0, -settings.save_every))[:3][::-1],
        f"steps {kept} of {settings.steps}",
    )
    return {
        "parameters": reference.find("ready")[0]["parameters"],
        "loss": dataclasses.asdict(loss) | {"resume_from": loss.resume_from.name},
        "losses": dataclasses.asdict(compared),
        "saves": job.find("saved") + later.find("saved"),
    }


def check_resume(
    settings: Settings, reference: Job, later: Job, loss: phases.Loss, report: Report
) -> verify.LossComparison:
    """Checks that the resumed run goes on as the unbroken one did."""
    one, other = phases.steps_of(reference), phases.steps_of(later)
    compared = verify.compare_losses(one, other)
    middle = (compared.first + compared.last) // 2
    rows = []
    for step in (compared.first, compared.first + 1, middle, compared.last):
        losses = one[step]["loss"], other[step]["loss"]
        difference = abs(losses[1] / losses[0] - 1)
        rows.append([str(step), *(f"{each:.7f}" for each in losses), f"{difference:.1e}"])
    report.table(["step", "loss, unbroken", "loss, resumed", "relative difference"], rows)
    expected = checkpoints.step_of(loss.resume_from) + 1
    report.check(
        "the resumed run starts where the checkpoint ends",
        compared.first == expected and compared.last == settings.steps,
        f"steps {compared.first} to {compared.last}",
    )
    report.check(
        "data position and scheduler came back exactly",
        compared.same_data and compared.same_rates,
        "every batch and every learning rate equals the unbroken run's bit for bit",
    )
    report.check(
        "weights came back",
        compared.first_difference <= settings.first_loss_tolerance,
        f"first loss differs by {compared.first_difference:.1e} relative "
        f"(at most {settings.first_loss_tolerance:.0e}: other order of summation)",
    )
    report.check(
        "optimizer came back, losses match to the end",
        compared.largest_difference <= settings.loss_tolerance,
        f"largest relative difference {compared.largest_difference:.1e} "
        f"(at most {settings.loss_tolerance:.0e})",
    )
    return compared


def use_model(settings: Settings, work: Path, report: Report) -> dict[str, Any]:
    """Loads the model of the last step with transformers and compares every weight."""
    report.heading("The model of the last step in transformers")
    final = checkpoints.directory_of(work / "checkpoints", settings.steps) / "model"
    for path in sorted(final.iterdir()):
        if path.is_file():
            report.note(f"  {path.name:36} {path.stat().st_size:>12,} bytes")
    exported = verify.load_exported(final, work / REFERENCE_FILE, settings, _PROMPT)
    report.check(
        "AutoModelForCausalLM.from_pretrained has the trained weights",
        not exported.different and exported.tensors > 0,
        f"{exported.tensors} tensors, {megabytes(exported.size)}, "
        + (
            f"different: {', '.join(exported.different)}"
            if exported.different
            else "equal bit for bit"
        ),
    )
    report.check(
        "it generates",
        len(exported.text) > len(_PROMPT),
        f"{settings.generated_tokens} tokens after {_PROMPT!r}",
    )
    report.console.print(exported.text, style="cyan", markup=False, highlight=False)
    report.note(f"({settings.steps} steps teach so small a model little more than spelling.)")
    return dataclasses.asdict(exported)


def compare_speed(settings: Settings, work: Path, report: Report) -> dict[str, Any]:
    """Reloads the last checkpoint on more processes and times saves against stock DCP."""
    world = settings.world_again
    report.heading(f"Loaded again on {world} processes; saves beside stock DCP")
    arguments = [f"--root={work / 'checkpoints'}"]
    with Job("speed", "speed.py", world, work, arguments) as job:
        phases.follow(job, report, settings.speed_rounds)
    reloaded = job.find("reloaded")[0]
    report.check(
        f"the checkpoint of {settings.world_after} processes loads on {world}",
        not reloaded["different"] and reloaded["step"] == settings.steps,
        f"{reloaded['tensors']} weights of step {reloaded['step']} "
        + ("differ" if reloaded["different"] else "equal bit for bit"),
    )
    rounds = job.find("round")
    rows, result = [], {}
    for side in (OURS, STOCK):
        mine = [event for event in rounds if event["side"] == side]
        rates = [event["bytes"] / event["seconds"] / 1e9 for event in mine]
        result[side] = {"bytes": mine[0]["bytes"], "seconds": [e["seconds"] for e in mine]}
        median = statistics.median(rates)
        result[side]["gigabytes_per_second"] = median
        spread = f"{min(rates):.2f} to {max(rates):.2f}"
        rows.append([side, megabytes(mine[0]["bytes"]), f"{median:.2f} GB/s", spread])
    ratio = result[OURS]["gigabytes_per_second"] / result[STOCK]["gigabytes_per_second"]
    report.table(["durable save", "size", "median", f"range of {settings.speed_rounds}"], rows)
    report.note(
        f"Here torch_ckpt saves {ratio:.1f} times as fast as stock DCP's HuggingFaceStorageWriter. "
        "The state is small and the machine is shared by all ranks: ./dev bench measures properly."
    )
    return {"reloaded": reloaded, "sides": result, "ratio": ratio}


def run(settings: Settings, work: Path, report: Report) -> dict[str, Any]:
    """Runs all parts; returns the figures and checks."""
    begin = time.monotonic()
    result: dict[str, Any] = {
        "settings": dataclasses.asdict(settings),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    prepare(settings, work, report)
    result["training"] = train(settings, work, report)
    result["model"] = use_model(settings, work, report)
    result["speed"] = compare_speed(settings, work, report)
    result["seconds"] = time.monotonic() - begin
    result["checks"] = [dataclasses.asdict(check) for check in report.checks]
    return result


@click.command()
@click.option("--quick", is_flag=True, help="A tiny model and few steps: shows less, for tests.")
@click.option(
    "--workdir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where checkpoints and logs go; must be new or empty. Default: a temporary directory.",
)
@click.option("--keep", is_flag=True, help="Keep the temporary directory at the end.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write figures and checks here."
)
def command(quick: bool, workdir: Path | None, keep: bool, json_file: Path | None) -> None:
    """Train a small language model, lose a rank while it saves, go on, and check everything.

    The exit status is 0 if every check passed. A directory given by --workdir is always kept.
    """
    if workdir is not None and workdir.is_dir() and any(workdir.iterdir()):
        raise click.UsageError(f"--workdir {workdir} is not empty; give a new directory.")
    # A terminated demo leaves no training behind: every job is ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    transformers.utils.logging.disable_progress_bar()
    report = Report(Console())
    if workdir is None:
        work = Path(tempfile.mkdtemp(prefix="torch_ckpt-demo-"))
    else:
        work = workdir.resolve()
        work.mkdir(parents=True, exist_ok=True)
    passed = False
    try:
        result = run(QUICK if quick else FULL, work, report)
        passed = report.summary()
        report.note(f"It took {result['seconds']:.0f} seconds.")
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except DemoError as error:
        report.failure(str(error))
    finally:
        if workdir is None and passed and not keep:
            shutil.rmtree(work)
        else:
            report.note(f"Checkpoints and logs are in {work}")
    sys.exit(0 if passed else 1)
