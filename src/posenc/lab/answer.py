"""The answer of a run, in sentences: which encoding at the training length, which past it, and how sure that is.

Small models mislead past the training length. Where a stronger run is known (evidence.py), its verdict comes first and the
run's own is compared with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import evidence, published, verdict
from .results import Results, metric_of
from .texts import Words
from .verdict import Standing

NAMED = 3  # encodings of a group that a sentence names beside the best
OTHER_TASKS = 2  # tasks beside the main one that have a sentence


class Answer(NamedTuple):
    """The answer to one question: a sentence to read first, and what belongs to it."""

    bold: str
    more: str


def answers(results: Results, words: Words) -> list[Answer]:
    """Three answers: at the training length, past it, how sure; before them, whether the run is unfinished."""
    task = main_task(results)
    first = Answer(words("provisional", finished=results.finished, wanted=results.wanted), "")
    found = [at_training_length(results, task, words), past_it(results, task, words), how_sure(results, task, words)]
    unfinished = [first] if results.finished < results.wanted else []
    return unfinished + [answer for answer in found if answer is not None]


def main_task(results: Results) -> dict[str, Any]:
    """The task that the answer is about: text, or the first."""
    return evidence.text_task(results) or results.tasks()[0]


# ---- the three questions ------------------------------------------------------------------------------------------
def at_training_length(results: Results, task: dict[str, Any], words: Words) -> Answer:
    level, others = verdict.best_here(results, task)
    about = _about(results, task, words)
    if not level:
        return Answer(words("no result"), about)
    values = {"size": length(task, task["train"], words), "unit": words(f"{metric_of(task)} unit")}
    scores = [f"{s.here.value:.3f}" for s in level]  # type: ignore[union-attr]
    names = words.names([s.encoding for s in level])
    if len(level) == 1:
        bold = words("here best", names=names, score=scores[0], **values)
    else:
        bold = words("here level", names=names, low=scores[0], high=scores[-1], **values)
    following = words.names([f"{s.encoding} {s.here.value:.3f}" for s in others[:NAMED]])  # type: ignore[union-attr]
    little = metric_of(task) == "loss" and level[0].here.value > verdict.LITTLE  # type: ignore[union-attr]
    warning = words("learned little", loss=verdict.LITTLE) if little else ""
    return Answer(bold, words.join(warning, words("here next", names=following) if following else "", about))


def past_it(results: Results, task: dict[str, Any], words: Words) -> Answer:
    stronger, own = evidence.stronger_than(results), _holders(results, task)
    if stronger is not None:
        answer = _past_it_there(results, task, own, *stronger, words)
    else:
        answer = _past_it_here(results, task, own, words)
    return Answer(answer.bold, words.join(answer.more, *_other_tasks(results, task, words)))


def how_sure(results: Results, task: dict[str, Any], words: Words) -> Answer | None:
    if not any(s.far for s in verdict.standings(results, task)):
        return None
    stronger, more = evidence.stronger_than(results), []
    if stronger is not None:
        bold = _sure_of_order(*stronger, words, "sure stronger")
        more += [words("chance"), _seeds_here(results, task, words)]
    elif task["seeds"] == 1:
        bold = _sure_with_one_seed(results, task, words)
    else:
        bold = _sure_of_order(results, task, words, "sure apart")
        more.append(words("chance"))
    if results.experiment.get("published"):
        more.append(_published(results, words, "published agrees"))
    elif stronger is not None:
        more.append(_published(stronger[0], words, "published agrees stronger"))
    return Answer(bold, words.join(*more))


def limits(results: Results, words: Words) -> str:
    """What the answer does not cover."""
    if metric_of(main_task(results)) != "loss":
        return ""
    stronger = evidence.stronger_than(results)
    if stronger is None:
        return words("limits", source=source(results, words))
    return words("limits stronger", theirs=source(stronger[0], words), ours=source(results, words))


# ---- parts --------------------------------------------------------------------------------------------------------
def _past_it_here(results: Results, task: dict[str, Any], own: list[Standing], words: Words) -> Answer:
    far, metric = max(task["test"]), metric_of(task)
    size = length(task, far, words)
    known = [s for s in verdict.standings(results, task) if s.far is not None and s.here is not None]
    if not known:
        return Answer(words("far unknown", size=size), "")
    values = {"size": size, "times": far / task["train"], "unit": words(f"{metric} unit")}
    meaning = words("holds means" if metric == "loss" else "holds means accuracy", hold=verdict.HOLDS[metric])
    if not own:
        nearest = next((s for s in known if "+" not in s.encoding), known[0])
        return Answer(words("far none", best=nearest.encoding, change=nearest.change, **values), meaning)
    others = [s.encoding for s in own[1:]]
    bold = words("far first" if others else "far alone", best=own[0].encoding, change=own[0].change, **values)
    return Answer(bold, words.join(words.number_of("also hold", others) if others else "", meaning))


def _past_it_there(
    results: Results, task: dict[str, Any], own: list[Standing], stronger: Results, theirs: dict[str, Any], words: Words
) -> Answer:
    """The stronger run's verdict, and whether this run agrees."""
    ranked = verdict.standings(stronger, theirs)
    hold = [s for s in ranked if s.outcome == "holds"]
    best = hold[0] if hold else ranked[0]
    key = "far stronger none" if not hold else "far stronger" if len(hold) > 1 else "far stronger alone"
    bold = words(
        key, gpu=gpu(stronger), from_=theirs["train"], to=length(theirs, max(theirs["test"]), words),
        best=best.encoding, change=best.change,
    )  # fmt: skip
    outcome = {s.encoding: s.outcome for s in ranked}
    here = length(task, max(task["test"]), words)
    contradicted = [s.encoding for s in own if outcome.get(s.encoding, "holds") != "holds"]
    why = words("semicolon").join(_reasons(results, task, stronger, theirs, words))
    if contradicted:
        groups = []
        for worse in ("loses", "breaks", "cannot", "missing"):
            names = [s.encoding for s in own if outcome.get(s.encoding, "missing") == worse]
            groups += [words.number_of(f"there {worse}", names)] if names else []
        there = words("comma").join(groups[:-1]) + words("clauses") * (len(groups) > 1) + groups[-1]
        more = words.number_of("disagree", [s.encoding for s in own], size=here, there=there, reasons=why)
    elif best.encoding not in results.encodings(task):
        holding = words.number_of("group holds", [s.encoding for s in own]) if own else words("none holds here")
        more = words.join(words("not here", best=best.encoding), words("weaker", size=here, names=holding, reasons=why))
    elif own:
        more = words("agree", size=here)
    else:
        more = words("weaker", size=here, names=words("none holds here"), reasons=why)
    return Answer(bold, words.join(words("holds means", hold=verdict.HOLDS["loss"]), more))


def _reasons(
    results: Results, task: dict[str, Any], stronger: Results, theirs: dict[str, Any], words: Words
) -> list[str]:
    """Why the stronger run is stronger."""
    times = _parameters(stronger, theirs) / _parameters(results, task)
    found = [words("reason parameters", times=times, parameters=parameters(stronger, theirs, words))]
    more = evidence.trained_bytes(theirs) / evidence.trained_bytes(task)
    if more > 1.5:
        found.append(words("reason data", times=more))
    there, here = stronger.seed_numbers(theirs)[0], results.seed_numbers(task)[1] or task["seeds"]
    if there > here:  # every encoding
        found.append(words("reason seeds", theirs=there, ours=here))
    reaches = [max(t["test"]) / t["train"] for t in (theirs, task)]
    if reaches[0] > reaches[1]:
        found.append(words("reason reach", theirs=reaches[0], ours=reaches[1]))
    return found


def _holders(results: Results, task: dict[str, Any]) -> list[Standing]:
    """The encodings that hold to the largest tested size, best first; extensions only if nothing else holds."""
    hold = [s for s in verdict.standings(results, task) if s.outcome == "holds"]
    return [s for s in hold if "+" not in s.encoding] or hold


def _other_tasks(results: Results, main: dict[str, Any], words: Words) -> list[str]:
    found = []
    others = [task for task in results.tasks() if task is not main]
    for task in others[:OTHER_TASKS]:
        ranked = [s for s in verdict.standings(results, task) if "+" not in s.encoding]
        hold = [s.encoding for s in ranked if s.outcome == "holds"]
        failed = [s.encoding for s in ranked if s.outcome == "not learnt"]
        groups = [words.number_of("group holds", hold) if hold else words("group nobody")]
        groups += [words.number_of("group not learnt", failed)] if failed else []
        shown = words("semicolon").join(groups)
        found.append(words("other tasks", task=task["task"], what=what(task, words), groups=shown))
    if len(others) > OTHER_TASKS:
        found.append(words("more tasks", count=len(others) - OTHER_TASKS))
    return found


def _sure_of_order(results: Results, task: dict[str, Any], words: Words, key: str) -> str:
    """Whether the two best encodings at the largest size differ by more than chance."""
    ranked = [s for s in verdict.standings(results, task) if s.far is not None and "+" not in s.encoding]
    ranked = ranked or [s for s in verdict.standings(results, task) if s.far is not None]
    values = {"seeds": seeds(results, task, words), "size": length(task, max(task["test"]), words)}
    first = ranked[0]
    if len(ranked) == 1:
        return words("sure alone", first=first.encoding, **values)
    second = ranked[1]
    assert first.far is not None and second.far is not None
    if not verdict.apart(first.far, second.far, metric_of(task)):
        key = "sure level"
    return words(key, first=first.encoding, a=first.far, second=second.encoding, b=second.far, **values)


def _sure_with_one_seed(results: Results, task: dict[str, Any], words: Words) -> str:
    metric = metric_of(task)
    lost = [
        abs(s.far.value - s.here.value)
        for s in verdict.standings(results, task)
        if s.outcome == "breaks" and s.far and s.here and "+" not in s.encoding
    ]
    clear = words("clear", least=min(lost)) if lost else words("clear none")
    return words("sure one", noise=verdict.HOLDS[metric], unit=words(f"{metric} unit"), clear=clear)


def _seeds_here(results: Results, task: dict[str, Any], words: Words) -> str:
    if task["seeds"] == 1:
        metric = metric_of(task)
        return words("this one seed", noise=verdict.HOLDS[metric], unit=words(f"{metric} unit"))
    return words("this seeds", seeds=seeds(results, task, words))


def _published(results: Results, words: Words, key: str) -> str:
    names = results.experiment["published"]
    entries = [row for name in names for row in published.rows(name, results) if row[3] is not None]
    if not entries:
        return ""
    agree = sum(published.outcomes_agree(row[2], row[3]) for row in entries)  # type: ignore[arg-type]
    papers = words.names([published.TABLES[name][0].split(" (")[0] for name in names])
    return words(key, agree=agree, found=len(entries), papers=papers)


# ---- words for a run's facts --------------------------------------------------------------------------------------
def length(task: dict[str, Any], size: int, words: Words) -> str:
    return words("bytes" if metric_of(task) == "loss" else "size", size=size)


def seeds(results: Results, task: dict[str, Any], words: Words) -> str:
    """How many seeds there are so far: a run in parts may have fewer than it asks for."""
    least, most = results.seed_numbers(task)
    if most == 0:
        least = most = task["seeds"]
    if least != most:
        return words("seeds range", least=least, most=most)
    return words("seeds 1") if most == 1 else words("seeds n", count=most)


def what(task: dict[str, Any], words: Words) -> str:
    """What a task asks for."""
    name = task["task"].split(":")[0]
    if words.has(f"task {name}"):
        return words(f"task {name}")
    from .tasks import task_class  # a task that was added to the folder

    return task_class(name).summary


def source(results: Results, words: Words) -> str:
    """The text that the models were trained on."""
    name = str(results.experiment.get("text", {}).get("source") or "")
    if name == "the Python standard library":
        version = str(results.machine.get("python") or "").split(".")
        return words("standard library", python=".".join(version[:2])) if version[0] else words("standard library ?")
    return name or words("unknown text")


def gpu(results: Results) -> str:
    return str(results.machine.get("gpu", "GPU")).removeprefix("NVIDIA ")


def parameters(results: Results, task: dict[str, Any], words: Words) -> str:
    """The size of a task's models, from the records of their training."""
    count = _parameters(results, task)
    return words("million", count=count / 1e6) if count >= 1e6 else f"{count:,.0f}"


def _parameters(results: Results, task: dict[str, Any]) -> float:
    numbers = [t["parameters"] for t in results.trainings if t["settings"]["task"] == task["task"]]
    return float(min(numbers) or 1) if numbers else evidence.model_size(task)


def _about(results: Results, task: dict[str, Any], words: Words) -> str:
    values = {"task": task["task"], "what": what(task, words)}
    if metric_of(task) == "loss":
        return words("here task", source=source(results, words), **values)
    return words("here problem", **values)
