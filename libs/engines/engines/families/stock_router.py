"""The balancing loss of routers of a type that no family describes: where its modelling code computes Mixtral's.

Transformers copies `load_balancing_loss_func` from file to file. Where the copy is the same code, its formula is that
of `engines.families.router`, over the same recorded router logits.
"""

import importlib
import inspect
from types import CodeType, FunctionType
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from engines.families.router import RouterLoss

_FUNCTION = "load_balancing_loss_func"
_COEFFICIENT = "router_aux_loss_coef"
_MODEL = "transformers.models.mixtral.modeling_mixtral"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "num_experts_per_token")


def stock_router_loss(
    config: Any, coefficient: float | None = None, z_coefficient: float = 0.0, model: Any = None
) -> RouterLoss | None:
    """Return the router's loss of a text config where it is asked for, by `output_router_logits` or a `coefficient`.

    `model`: the class that computes it, where the text part is inside of another model.

    ValueError where the type's modelling code has no such loss, or another one; for a z-loss, as nothing says how many
    layers route.
    """
    kind = config.model_type
    wanted = coefficient
    if coefficient is None and getattr(config, "output_router_logits", False):
        wanted = getattr(config, _COEFFICIENT, 0.0)
    if z_coefficient:
        raise ValueError(f"{kind}: the z-loss is for described families: set router_z_loss_coef to 0")
    if not wanted:
        return None
    model = model or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    own, stock, forward = _function(model.__module__), _function(_MODEL), inspect.unwrap(model.forward).__code__
    assert stock is not None
    if own is not None and not {_FUNCTION, _COEFFICIENT} <= {*forward.co_names}:
        own = None  # it is there, and weighed by another field
    experts, chosen = (_field(config, names) for names in (_EXPERTS, _CHOSEN))
    if own is None or _meaning(own) != _meaning(stock) or experts is None or chosen is None:
        raise ValueError(
            f"{kind}: transformers' modelling code has no balancing loss of routers, or not that of Mixtral: set "
            "router_aux_loss_coef to 0"
        )
    return RouterLoss(float(wanted), experts, chosen, layers=0)


def _function(module: str) -> CodeType | None:
    function = getattr(importlib.import_module(module), _FUNCTION, None)
    return function.__code__ if isinstance(function, FunctionType) else None


def _meaning(code: CodeType) -> tuple[Any, ...]:
    """Return what a function computes: its instructions, names and constants, without its docstring."""
    return code.co_code, code.co_names, code.co_varnames, code.co_consts[1:]


def _field(config: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
