"""What a record consumed, declared as data: the rules by which one divergence explains another.

A rule speaks of records of one phase and role. Its ``always`` sources were consumed in any case; of its
``tiers`` the first one that the runs recorded counts (``[GEMM, module, anything earlier]``: the closest known
ancestor). ``content`` sources are linked by their bits: a tensor that has the same bits as an earlier one, in
both runs, is that one, whichever rank it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mindspeed_precision.records import NO_MICROBATCH, Phase, RecordKey, Role


class Names(Enum):
    """How the fqn of a source relates to the fqn of the record that consumed it."""

    SAME = "same"
    OWNER = "owner"
    """The module that owns the parameter ``fqn``."""
    BELOW = "below"
    """Submodules, at any depth."""
    PARAMETERS = "parameters"
    """Parameters of the module and its submodules."""
    NEAR = "near"
    """Parameters of the module around this one: a bias may be added, or a weight used, outside its owner."""
    ANY = "any"


class When(Enum):
    """How the time of a source relates to the time of the record that consumed it."""

    MICROBATCH = "microbatch"
    """Same step and microbatch."""
    EARLIER = "earlier"
    """Same step and microbatch, and seen before it."""
    PREVIOUS = "previous"
    """The microbatch before; for the first one the last of the step before."""
    STEP = "step"
    """Same step, any microbatch or none."""
    MICROBATCHES = "microbatches"
    """Same step, any microbatch, but not of the whole step."""
    STATE = "state"
    """The last one before this step: what the step started from."""
    STREAM = "stream"
    """Any earlier step, or earlier microbatch of the step; same slot: a setting, or a stream of data."""


class Where(Enum):
    """On which ranks a source may be."""

    RANK = "rank"
    REPLICA = "replica"
    """Ranks that compute one data-parallel replica together."""
    ALL = "all"


@dataclass(frozen=True)
class Source:
    """Records that a rule says were consumed.

    Attributes:
        phase: their phase.
        roles: their roles.
        names: relation of fqns.
        when: relation of times.
        where: ranks.
        slot: their slot; None for any.
    """

    phase: Phase
    roles: tuple[Role, ...]
    names: Names = Names.SAME
    when: When = When.MICROBATCH
    where: Where = Where.RANK
    slot: str | None = None


@dataclass(frozen=True)
class Rule:
    """What records of one phase and role consumed.

    Attributes:
        phase: phase of the consumer.
        roles: its roles.
        slots: its slots; None for any.
        whole_step: only records of the whole step (True), of a microbatch (False), or both (None).
        of_parameter: only records about a declared parameter (True), only others (False), or both (None).
        content: roles with which it is linked by equal bits.
        always: consumed in any case.
        tiers: the first tier of which something was recorded was consumed.
    """

    phase: Phase
    roles: tuple[Role, ...]
    slots: tuple[str, ...] | None = None
    whole_step: bool | None = None
    of_parameter: bool | None = None
    content: tuple[Role, ...] = ()
    always: tuple[Source, ...] = ()
    tiers: tuple[tuple[Source, ...], ...] = ()

    def applies(self, key: RecordKey, *, is_parameter: bool) -> bool:
        """Tell whether the rule speaks of ``key``."""
        return (
            key.phase is self.phase
            and key.role in self.roles
            and (self.slots is None or key.slot in self.slots)
            and (self.whole_step is None or self.whole_step == (key.microbatch == NO_MICROBATCH))
            and (self.of_parameter is None or self.of_parameter == is_parameter)
        )


_GRADIENTS = (Role.WGRAD, Role.BGRAD)
PARAMETERS = (Role.PARAM, Role.MASTER_PARAM)
"""The roles of a parameter."""

UPDATED_FROM = (
    *_GRADIENTS,
    Role.MAIN_GRAD,
    Role.REDUCED_GRAD,
    Role.HYPERPARAMETER,
    Role.EXP_AVG,
    Role.EXP_AVG_SQ,
    *PARAMETERS,
)
"""The roles of what an update makes of a parameter, and makes it from, under the parameter's name."""

_TENSORS = (Role.INPUT, Role.OUTPUT)
_FLOW = (Role.GRAD_OUTPUT, Role.GRAD_INPUT)

_EARLIER_FORWARD = tuple(
    Source(phase, roles, Names.ANY, When.EARLIER, Where.REPLICA)
    for phase, roles in ((Phase.BATCH, (Role.BATCH,)), (Phase.FPROP, _TENSORS))
)
_EARLIER_BACKWARD = (
    *_EARLIER_FORWARD,
    Source(Phase.LOSS, (Role.LOSS,), Names.ANY, When.EARLIER, Where.REPLICA),
    Source(Phase.DGRAD, _FLOW, Names.ANY, When.EARLIER, Where.REPLICA),
)
_STATE_PARAMETERS = Source(Phase.OPTIMIZER, (Role.PARAM,), Names.PARAMETERS, When.STATE, Where.REPLICA)
_NEAR_PARAMETERS = Source(Phase.OPTIMIZER, (Role.PARAM,), Names.NEAR, When.STATE, Where.REPLICA)
_OWNER_TENSORS = (
    Source(Phase.DGRAD, (Role.GRAD_OUTPUT,), Names.OWNER, When.MICROBATCH, Where.REPLICA),
    Source(Phase.FPROP, (Role.INPUT,), Names.OWNER, When.MICROBATCH, Where.REPLICA),
)
_GRADIENT_TIERS = (
    (Source(Phase.ACCUMULATE, (Role.MAIN_GRAD,), Names.SAME, When.STEP, Where.ALL, "after"),),
    (Source(Phase.WGRAD, _GRADIENTS, Names.SAME, When.STEP, Where.ALL),),
    (Source(Phase.WGRAD, _GRADIENTS, Names.OWNER, When.STEP, Where.ALL),),
    (Source(Phase.DGRAD, _FLOW, Names.ANY, When.STEP, Where.ALL),),
)
_REDUCED_TIERS = (
    (Source(Phase.REDUCE, (Role.REDUCED_GRAD,), Names.SAME, When.STEP, Where.ALL),),
    (
        *_GRADIENT_TIERS[0],
        # of a dump that shows no clipping (msprobe): the norm of all gradients may have scaled each
        Source(Phase.ACCUMULATE, (Role.MAIN_GRAD,), Names.ANY, When.STEP, Where.ALL, "after"),
    ),
    *_GRADIENT_TIERS[1:],
)
_CLIPPED_TIERS = (
    (Source(Phase.CLIP, (Role.MAIN_GRAD,), Names.SAME, When.STEP, Where.ALL),),
    *_REDUCED_TIERS,
)
_GRAD_NORM = Source(Phase.CLIP, (Role.GRAD_NORM,), Names.ANY, When.STEP, Where.ALL, "")
_HYPERPARAMETERS = Source(Phase.OPTIMIZER, (Role.HYPERPARAMETER,), Names.SAME, When.STEP, Where.ALL)
_MOMENTS = Source(Phase.OPTIMIZER, (Role.EXP_AVG, Role.EXP_AVG_SQ), Names.SAME, When.STEP, Where.ALL)
_STEP_STATE = Source(Phase.OPTIMIZER, (Role.PARAM,), Names.SAME, When.STATE, Where.ALL)


def _own_state(role: Role) -> Source:
    return Source(Phase.OPTIMIZER, (role,), Names.SAME, When.STATE, Where.ALL)


RULES: tuple[Rule, ...] = (
    *(
        Rule(Phase.BATCH, (role,), always=(Source(Phase.BATCH, (role,), when=When.STREAM),))
        for role in (Role.BATCH, Role.RNG)
    ),
    Rule(
        Phase.FPROP,
        (Role.INPUT,),
        content=(Role.BATCH, Role.OUTPUT, Role.INPUT, Role.PARAM),
        always=(_NEAR_PARAMETERS,),
        tiers=(_EARLIER_FORWARD,),
    ),
    Rule(
        Phase.FPROP,
        (Role.OUTPUT,),
        always=(
            Source(Phase.FPROP, (Role.INPUT,), where=Where.REPLICA),
            Source(Phase.FPROP, (Role.OUTPUT,), Names.BELOW, When.EARLIER, Where.REPLICA),
            # what the collectives called in it gave back (vocabulary-parallel loss)
            Source(Phase.FPROP, (Role.OUTPUT,), Names.SAME, When.EARLIER),
            _STATE_PARAMETERS,
        ),
    ),
    Rule(
        Phase.LOSS,
        (Role.LOSS,),
        whole_step=False,
        always=(
            Source(Phase.FPROP, (Role.OUTPUT,), Names.ANY, When.EARLIER, Where.REPLICA),
            Source(Phase.LOSS, (Role.LOSS,), Names.ANY, When.EARLIER, Where.REPLICA),
            Source(Phase.BATCH, (Role.BATCH,), Names.ANY, When.EARLIER, Where.REPLICA),
        ),
    ),
    Rule(
        Phase.LOSS,
        (Role.LOSS,),
        whole_step=True,
        always=(
            Source(Phase.LOSS, (Role.LOSS,), Names.ANY, When.MICROBATCHES, Where.ALL),
            Source(Phase.FPROP, (Role.OUTPUT,), Names.ANY, When.MICROBATCHES, Where.ALL),
            Source(Phase.BATCH, (Role.BATCH,), Names.ANY, When.MICROBATCHES, Where.ALL),
        ),
    ),
    Rule(
        Phase.DGRAD,
        (Role.GRAD_OUTPUT,),
        content=(Role.GRAD_INPUT, Role.GRAD_OUTPUT),
        always=(_NEAR_PARAMETERS,),
        tiers=(_EARLIER_BACKWARD,),
    ),
    Rule(
        Phase.DGRAD,
        (Role.GRAD_INPUT,),
        always=(
            Source(Phase.DGRAD, (Role.GRAD_OUTPUT,), where=Where.REPLICA),
            Source(Phase.FPROP, _TENSORS, where=Where.REPLICA),
            Source(Phase.FPROP, _TENSORS, Names.BELOW, where=Where.REPLICA),
            _STATE_PARAMETERS,
            # the gradient of a tensor with several readers is a sum: other branches flow in
            Source(Phase.DGRAD, _FLOW, Names.ANY, When.EARLIER, Where.REPLICA),
        ),
    ),
    Rule(
        Phase.WGRAD,
        (Role.GRAD_OUTPUT,),
        content=_FLOW,
        tiers=(
            (Source(Phase.DGRAD, (Role.GRAD_OUTPUT,), where=Where.REPLICA),),
            _EARLIER_BACKWARD,
        ),
    ),
    Rule(
        Phase.WGRAD,
        (Role.INPUT,),
        content=_TENSORS,
        tiers=((Source(Phase.FPROP, (Role.INPUT,), where=Where.REPLICA),), _EARLIER_FORWARD),
    ),
    # an expert's, summed over a step
    Rule(
        Phase.WGRAD,
        _GRADIENTS,
        whole_step=True,
        tiers=(
            (Source(Phase.WGRAD, _GRADIENTS, Names.OWNER, When.STEP, Where.ALL),),
            (
                Source(Phase.DGRAD, _FLOW, Names.ANY, When.MICROBATCHES, Where.ALL),
                Source(Phase.FPROP, _TENSORS, Names.ANY, When.MICROBATCHES, Where.ALL),
            ),
            (Source(Phase.WGRAD, (Role.GRAD_OUTPUT, Role.INPUT), Names.ANY, When.MICROBATCHES, Where.ALL),),
        ),
    ),
    Rule(
        Phase.WGRAD,
        _GRADIENTS,
        of_parameter=False,
        tiers=(
            (Source(Phase.WGRAD, (Role.GRAD_OUTPUT, Role.INPUT)),),
            (
                Source(Phase.DGRAD, (Role.GRAD_OUTPUT,), where=Where.REPLICA),
                Source(Phase.FPROP, (Role.INPUT,), where=Where.REPLICA),
            ),
            _EARLIER_BACKWARD,
        ),
    ),
    Rule(
        Phase.WGRAD,
        _GRADIENTS,
        of_parameter=True,
        tiers=(
            (Source(Phase.WGRAD, _GRADIENTS, Names.OWNER),),
            _OWNER_TENSORS,
            _EARLIER_BACKWARD,
        ),
    ),
    Rule(
        Phase.ACCUMULATE,
        (Role.MAIN_GRAD,),
        slots=("before",),
        always=(Source(Phase.ACCUMULATE, (Role.MAIN_GRAD,), when=When.PREVIOUS, slot="after"),),
    ),
    Rule(
        Phase.ACCUMULATE,
        (Role.MAIN_GRAD,),
        slots=("after",),
        always=(Source(Phase.ACCUMULATE, (Role.MAIN_GRAD,), slot="before"),),
        tiers=(
            (Source(Phase.WGRAD, _GRADIENTS),),
            (Source(Phase.WGRAD, _GRADIENTS, Names.OWNER),),
            _OWNER_TENSORS,
            _EARLIER_BACKWARD,
        ),
    ),
    # a bucket of gradients, given to a collective and got back; later reductions take what earlier ones left
    Rule(
        Phase.REDUCE,
        (Role.MAIN_GRAD,),
        always=(Source(Phase.REDUCE, (Role.REDUCED_GRAD,), Names.ANY, When.EARLIER),),
        tiers=(
            (Source(Phase.ACCUMULATE, (Role.MAIN_GRAD,), Names.ANY, When.STEP, slot="after"),),
            (Source(Phase.WGRAD, _GRADIENTS, Names.ANY, When.STEP),),
            (Source(Phase.DGRAD, _FLOW, Names.ANY, When.STEP),),
        ),
    ),
    Rule(
        Phase.REDUCE,
        (Role.REDUCED_GRAD,),
        of_parameter=False,
        always=(Source(Phase.REDUCE, (Role.MAIN_GRAD,), when=When.STEP, where=Where.ALL),),
    ),
    Rule(Phase.REDUCE, (Role.REDUCED_GRAD,), tiers=_GRADIENT_TIERS),
    Rule(
        Phase.CLIP,
        (Role.GRAD_NORM,),
        slots=("",),
        tiers=(
            (Source(Phase.REDUCE, (Role.REDUCED_GRAD,), Names.ANY, When.STEP, Where.ALL),),
            (Source(Phase.ACCUMULATE, (Role.MAIN_GRAD,), Names.ANY, When.STEP, Where.ALL, "after"),),
            (Source(Phase.WGRAD, _GRADIENTS, Names.ANY, When.STEP, Where.ALL),),
            (Source(Phase.DGRAD, _FLOW, Names.ANY, When.STEP, Where.ALL),),
        ),
    ),
    Rule(
        Phase.CLIP,
        (Role.GRAD_NORM,),
        always=(
            _GRAD_NORM,
            Source(Phase.CLIP, (Role.MAIN_GRAD,), Names.ANY, When.STEP, Where.ALL),
            Source(Phase.REDUCE, (Role.REDUCED_GRAD,), Names.ANY, When.STEP, Where.ALL),
        ),
    ),
    Rule(Phase.CLIP, (Role.MAIN_GRAD,), always=(_GRAD_NORM,), tiers=_REDUCED_TIERS),
    Rule(
        Phase.OPTIMIZER,
        (Role.BUFFER,),
        always=(
            _own_state(Role.BUFFER),
            Source(Phase.FPROP, _TENSORS, Names.ANY, When.STEP, Where.ALL),
        ),
    ),
    *(
        # Megatron's groups hold the factor and the product: the product is what the optimizer uses
        Rule(
            Phase.OPTIMIZER,
            (Role.HYPERPARAMETER,),
            slots=(factor,),
            always=(
                Source(Phase.OPTIMIZER, (Role.HYPERPARAMETER,), when=When.STREAM),
                Source(Phase.OPTIMIZER, (Role.HYPERPARAMETER,), when=When.STEP, slot=product),
            ),
        )
        for factor, product in (("wd_mult", "weight_decay"), ("lr_mult", "lr"))
    ),
    Rule(
        Phase.OPTIMIZER,
        (Role.HYPERPARAMETER,),
        always=(Source(Phase.OPTIMIZER, (Role.HYPERPARAMETER,), when=When.STREAM),),
    ),
    *(
        Rule(Phase.OPTIMIZER, (role,), always=(_HYPERPARAMETERS, _own_state(role)), tiers=_CLIPPED_TIERS)
        for role in (Role.EXP_AVG, Role.EXP_AVG_SQ)
    ),
    Rule(
        Phase.OPTIMIZER,
        (Role.MASTER_PARAM,),
        always=(_HYPERPARAMETERS, _MOMENTS, _own_state(Role.MASTER_PARAM), _STEP_STATE),
        tiers=_CLIPPED_TIERS,
    ),
    Rule(
        Phase.OPTIMIZER,
        (Role.PARAM,),
        always=(
            _HYPERPARAMETERS,
            _MOMENTS,
            Source(Phase.OPTIMIZER, (Role.MASTER_PARAM,), Names.SAME, When.STEP, Where.ALL),
            _own_state(Role.MASTER_PARAM),
            _STEP_STATE,
        ),
        tiers=_CLIPPED_TIERS,
    ),
)
"""The first rule that applies counts. A record of which no rule speaks (initial parameters)
consumed nothing that the runs recorded: where it diverges, it is an origin."""


def rule_for(key: RecordKey, *, is_parameter: bool) -> Rule | None:
    """Return the rule that speaks of ``key``; None: it consumed nothing that is recorded."""
    return next((rule for rule in RULES if rule.applies(key, is_parameter=is_parameter)), None)
