"""Origin against propagated: which divergences start something, and which only pass it on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from mindspeed_precision.align.ranges import unranged
from mindspeed_precision.diagnose.graph import Graph, Node
from mindspeed_precision.records import Origin, Pair, Phase, RecordKey, Role, Side, Verdict


def find_origins(graph: Graph, own_fault: Callable[[Node], str] = lambda _: "") -> tuple[Origin, ...]:
    """Return every origin, first divergence first.

    A divergent record is propagated when something that it consumed diverges; the other ones are origins,
    grouped over ranks, and over the ranges of a distributed optimizer. Random state is an origin only where
    nothing else is: alone it changes no number.

    Args:
        graph: every comparison, linked by what it consumed.
        own_fault: says by what a record that is propagated shows a fault of its own, which makes it an origin
            as well; empty where nothing does.

    Returns:
        Origins in order of step, execution, rank, each with the number of divergences that lead back to it.
    """
    divergent = sorted(graph.divergent.nodes, key=lambda node: node.order)
    parents = {node: graph.explanation(node) for node in divergent}
    own = _own_faults(divergent, parents, own_fault)
    parents.update(dict.fromkeys(own))
    roots = _roots(divergent, parents)
    led_back: Counter[RecordKey] = Counter()
    for node, root in roots.items():
        led_back[unranged(root.key)] += graph.weigh([node]) if root is not node else 0
    by_key: dict[RecordKey, list[Node]] = defaultdict(list)
    for node in divergent:
        if roots[node] is node:
            by_key[unranged(node.key)].append(node)
    computed = {key: nodes for key, nodes in by_key.items() if key.role is not Role.RNG}
    return tuple(_origin(graph, nodes, led_back[key], own) for key, nodes in (computed or by_key).items())


def _own_faults(
    divergent: list[Node], parents: Mapping[Node, Node | None], own_fault: Callable[[Node], str]
) -> dict[Node, str]:
    """Find faults beside what explains a record; one that was met before is the same fault again."""
    first: dict[tuple[object, ...], int] = {}  # step in which a place was an origin first
    found: dict[Node, str] = {}
    for node in divergent:
        place, step = _place(node), node.key.step
        if parents[node] is None:
            first.setdefault(place, step)
        elif first.get(place, step) == step:
            told = own_fault(node)
            if told:
                found[node] = told
                first.setdefault(place, step)
    return found


def _place(node: Node) -> tuple[object, ...]:
    return node.key.phase, node.key.fqn, node.key.role, node.key.slot


def _origin(graph: Graph, nodes: list[Node], propagated: int, own: Mapping[Node, str]) -> Origin:
    first = min(nodes, key=lambda node: node.rank)
    pair = first.comparison.pair
    return Origin(
        comparison=first.comparison,
        ranks=graph.stand_ins.expanded((node.rank, node.key) for node in nodes),
        propagated=propagated,
        inputs=describe_inputs(graph, first, by_others=first in own),
        own=own.get(first, ""),
        held_by=pair.held_by.get(Side.CANDIDATE, ()) if isinstance(pair, Pair) else (),
    )


def _roots(divergent: list[Node], parents: dict[Node, Node | None]) -> dict[Node, Node]:
    """Follow explanations to their end; a circle (unknown dataflow) ends at its first record."""
    roots: dict[Node, Node] = {}
    for start in divergent:
        path: list[Node] = []
        on_path: set[Node] = set()
        node: Node = start
        while node not in roots and node not in on_path:
            path.append(node)
            on_path.add(node)
            parent = parents[node]
            if parent is None:
                break
            node = parent
        circle = node in on_path and parents[node] is not None and node not in roots
        root = (
            min(path[path.index(node) :], key=lambda member: member.order)
            if circle
            else roots.get(node, node)
        )
        roots.update(dict.fromkeys(path, root))
    return roots


def describe_inputs(graph: Graph, node: Node, *, by_others: bool = False) -> str:
    """Say in one phrase how what a record consumed compares; ``by_others``: it diverges, by another cause."""
    every = [other for other, ranks in graph.consumed_on(node) for _ in ranks]
    consumed = [other for other in every if not other.diverges]
    if graph.rule(node) is None or node.key.role in (Role.HYPERPARAMETER, Role.BATCH, Role.RNG):
        return "this is where it enters the run"
    if by_others:
        names = _names([other for other in every if other.diverges])
        return f"{names} differ{'s' if len(every) - len(consumed) == 1 else ''}, too, by another cause"
    if not consumed:
        return "nothing recorded before it differs"
    names = _names(consumed)
    tolerated = any(other.comparison.verdict is Verdict.WITHIN_TOLERANCE for other in consumed)
    verb = "has" if len(consumed) == 1 else "have"
    if tolerated:
        return f"{names} differ{'s' if len(consumed) == 1 else ''} within tolerance"
    return f"{names} {verb} the same bits on both sides"


def _names(consumed: list[Node]) -> str:
    roles = Counter(_name(other) for other in consumed)
    if len(roles) > 3:
        return f"all {len(consumed)} records that it consumed"
    names = [name if count == 1 else f"{count} {name}" for name, count in roles.items()]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _name(node: Node) -> str:
    """Name a consumed record by what it is, with its slot where the role alone says too little."""
    key = node.key
    if key.role is Role.HYPERPARAMETER:
        return "hyperparameters"
    if key.phase is Phase.ACCUMULATE:
        return f"main_grad {key.slot}"
    return str(key.role.value)
