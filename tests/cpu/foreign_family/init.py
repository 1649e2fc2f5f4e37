from foreign_family.config import ForeignSpec
from negamax.models.family import Initializer


def draw(name: str, spec: ForeignSpec) -> Initializer:
    if name.endswith(("norm", "scale", "before_look", "before_think")):
        return Initializer(std=0.2, mean=1.0)
    return Initializer(std=1.0 if name.endswith("table") else spec.hidden_size**-0.5)
