"""How W_Q and W_K of one attention module are found, and how calls show that it was right.

By names and shapes of what the module holds, or one around it.  Models differ in the order of a
projection's rows: in some sampled forwards the projections are listened to, and what they returned
is compared with the q and k of the call.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor, nn

from ..._util.guard import harmless
from ..._weights import locate, names, split_check
from ..._weights.learned_queries import of_parameters
from ..._weights.location import Location, Rows
from ..hosts import ModelHost
from .notes import NO_PROJECTION, OTHER_CALL, Notes
from .weights import Weights

NO_WEIGHTS = ("", "")  # Paths of a layer that is another call of the same module.
_NOT_FOUND = "W_Q and W_K not found: no spectral signals (give weights=)"
_NO_OTHER = "and no one projection makes the"
_CHECKS_MAX = 3  # Forwards in which the order of the rows is checked, until one tells it.


class WeightSearch:
    def __init__(
        self, host: ModelHost, notes: Notes, name: str, module: weakref.ref[nn.Module],
        paths: Optional[tuple[str, str]], weights: Weights,
        of_module: Callable[[nn.Module], Optional[WeightSearch]],
    ) -> None:  # fmt: skip
        """name       of the module in its model
        paths      of W_Q and W_K, where somebody has told them; NO_WEIGHTS
        weights    gets what is found
        of_module  the search of another module of the model, if it has a layer"""
        self.host, self._notes, self._name, self._module = host, notes, name, module
        here = module()
        self.normalizes = here is not None and len(names.norms(here)) == 2
        self._paths, self._weights, self._of_module = paths, weights, of_module
        self.lends = False  # Its projections are those of an attention elsewhere.
        self.listening: Optional[split_check.Listening] = None
        self._kv_heads = 0
        # From which module on paths go, and what they begin with.
        self._holder, self._prefix = module, ""
        self._places: list[Location] = []  # All that fit, the likeliest first.
        self._checks = 0  # Forwards that were listened to.

    # ---- where they are ----

    def begin(self, heads: int, kv_heads: int, dim: int, v_dim: int = 0) -> None:
        """The layout is known, by a call."""
        self._kv_heads = kv_heads
        holder = self._look_around()
        if holder is None:
            return
        if self._paths != NO_WEIGHTS:
            self._places = locate.candidates(
                holder, self._prefix, heads, kv_heads, dim, self._paths, v_dim
            )
        if self._places:
            self._place(self._places[0], holder)
        elif not self._listens():  # Else what is heard may tell.
            self._not_found()

    def layout(self) -> Optional[tuple[int, int, int]]:
        """(heads, key heads, dimension) as the weights say them, without a call."""
        module, holder = self._module(), self._look_around()
        found = None
        if module is not None and holder is not None:
            found = locate.layout_of(module, holder, self._prefix, self._paths)
        if found is None:
            self._not_found()
            return None
        if not found.told:
            self._notes.add(
                "the module does not say its heads: W_Q and W_K are taken as one head each"
            )
        return found.heads, found.kv_heads, found.dim

    def _look_around(self) -> Optional[nn.Module]:
        """Finds the module that holds the weights: the attention, or one around it."""
        module, root = self._module(), self.host.model()
        if module is None:
            return None
        holder, self._prefix = module, ""
        if self._paths is None:
            holder, self._prefix = locate.holder_of(module, self._name, root)
        elif self._paths == NO_WEIGHTS:  # By what is heard alone.
            pass
        elif root is not None and not locate.has_all(module, self._paths):
            holder = root
        self._holder = weakref.ref(holder)
        return holder

    def _not_found(self) -> None:
        if NO_PROJECTION in self._notes:
            return
        other = self._paths == NO_WEIGHTS
        self._notes.add(OTHER_CALL if other else _NOT_FOUND)

    def look_for_parameters(self, q: Tensor, k: Tensor) -> None:
        """Whether the weights were not found since there are none."""
        if self._weights.location is None and (of_parameters(q) or of_parameters(k)):
            self._notes.pop(_NOT_FOUND, None)
            self._notes.add(NO_PROJECTION)

    def _lenders(self, place: Location, holder: nn.Module) -> list[WeightSearch]:
        """Candidates whose projections these are, since they lie beside the attention."""
        found: list[WeightSearch] = []
        for path in dict.fromkeys((place.query.path, place.key.path)):
            owner = path.removesuffix(".weight").rpartition(".")[0]
            other = self._of_module(holder.get_submodule(owner)) if owner else None
            if other is not None and other is not self:
                found.append(other)
        return found

    def _place(self, place: Location, holder: nn.Module) -> None:
        for other in self._lenders(place, holder):
            other.lends = True
        self._weights.place(place, holder)

    # ---- whether their rows are those of the heads ----

    def listen(self) -> None:
        """The module's forward begins, in a sampled step."""
        if self._listens() or self._weights.checked or self._checks >= _CHECKS_MAX:
            return
        self._checks += 1
        module, holder = self._module(), self._look_around()
        if module is None or holder is None:
            return
        if self.listening is not None:
            self.listening.close()
        paths, around = self._projection_paths(holder), locate.around(self._name, self.host.model())
        self.listening = split_check.listen(module, holder, paths, around)

    def listen_with(self, other: WeightSearch) -> None:
        """To the same forward."""
        self.listening = None if self._weights.checked else other.listening

    def heard(self) -> None:
        """The forward is over."""
        if self.listening is not None:
            self.listening.end()

    def ends(self) -> None:
        """The watching does: nothing of the module is heard any more."""
        if self.listening is not None:
            self.listening.close()

    def _listens(self) -> bool:
        return self.listening is not None and self.listening.active

    def _projection_paths(self, holder: nn.Module) -> list[str]:
        """Of all that q and k may come from."""
        paths = locate.projection_paths(holder, self._prefix, self._paths)
        others = locate.matrices_in(holder) if self._paths is None else []
        return paths + [path for path in others if path not in paths]

    def unsure_projections(
        self, heads: int, kv_heads: int, dim: int, v_dim: int
    ) -> dict[str, nn.Module]:
        """By their paths, those whose rows a call can show; none where each has its own."""
        holder = self._look_around()
        if holder is None or self._weights.checked or self._paths == NO_WEIGHTS:
            return {}
        places = locate.candidates(holder, self._prefix, heads, kv_heads, dim, self._paths, v_dim)
        if places and places[0].sure and places[0].query.path != places[0].key.path:
            return {}
        return split_check.modules_of(holder, self._projection_paths(holder))

    @harmless("forward of an attention module")
    def check(self, q: Tensor, k: Tensor) -> None:
        """At a call: q [batch, heads, tokens, dim] and k, which may have copies of key heads, as
        attention is given them."""
        place, heard, holder = self._weights.location, self.listening, self._holder()
        if holder is None or self._weights.checked:
            return
        lenders = self._lenders(place, holder) if place is not None else []
        if lenders and heard is None:  # In its first forward the module is not known yet.
            heard = split_check.Listening({}, {})
        if heard is None or not heard.active:
            return
        for other in lenders:
            for rows in (place.query, place.key) if place is not None else ():
                if other.listening is not None:
                    heard.take(holder, rows.path, other.listening)
        with torch.no_grad():
            self._check_by(split_check.evidence(heard, q, k), holder)
            if self._weights.location is None and not self._weights.checked:
                self._look_elsewhere(heard, q, k, holder)

    def check_by(self, shown: Optional[split_check.Evidence]) -> None:
        """The same by what was found while the call was traced."""
        holder = self._holder()
        if shown is not None and holder is not None and not self._weights.checked:
            self._check_by(shown, holder)

    def _check_by(self, shown: split_check.Evidence, holder: nn.Module) -> None:
        weights = self._weights
        place = weights.location
        if place is None:
            self._search(shown, holder)
            return
        if shown.heads != place.heads or shown.key_heads % place.kv_heads:
            return
        verdict = split_check.check(self._places, shown, place.kv_heads)
        weights.checked = verdict.checked
        if verdict.location is None:
            self._notes.add(
                f"the rows of {place.how} are not those of the heads that attention is given: "
                "no spectral signals (give weights=)"
            )
            weights.checked = True
            weights.give_up()
        else:
            weights.correct(verdict.location)

    def _search(self, shown: split_check.Evidence, holder: nn.Module) -> None:
        """Without a name that is known: by what the module's matrices return."""
        query, key = split_check.search(shown, self._kv_heads)
        if query is None or key is None:
            self._one_found(query, key)
            return
        self._searched()
        self._place(split_check.by_rows(query, key), holder)

    def _searched(self) -> None:
        self._weights.checked = True
        halves = [note for note in self._notes if _NO_OTHER in note]
        for told in (_NOT_FOUND, OTHER_CALL, *halves):  # Of a call before this one.
            self._notes.pop(told, None)

    def _look_elsewhere(
        self, heard: split_check.Listening, q: Tensor, k: Tensor, holder: nn.Module
    ) -> None:
        """For keys that another layer has made in the same forward, as models have them that keep
        those of some layers only."""
        root = self.host.model()
        query, _ = split_check.search(split_check.evidence(heard, q, k), self._kv_heads)
        if root is None or query is None:
            return
        names_of = {id(module): name for name, module in root.named_modules()}
        for module in root.modules():
            other = self._of_module(module)
            if other is None or other is self:
                continue
            key = other.makes(q, k, self._kv_heads)
            if key is None or id(holder) not in names_of or id(key[0]) not in names_of:
                continue
            rows = [
                dataclasses.replace(part, path=f"{names_of[id(owner)]}.{part.path}".lstrip("."))
                for owner, part in ((holder, query), key)
            ]
            self._searched()
            self._holder = weakref.ref(root)
            how = f"by its rows {query.path}, with the keys of {names_of[id(module)]}"
            self._weights.place(Location(how, rows[0], rows[1], shared=True), root)
            return

    def makes(self, q: Tensor, k: Tensor, kv_heads: int) -> Optional[tuple[nn.Module, Rows]]:
        """The rows of its projections that these keys are made of, and the module from which on
        their path goes; None if they are made of others."""
        found, heard = self._weights.found(), self.listening
        if found is None or heard is None or found[1].kv_heads != kv_heads:
            return None
        shown = split_check.evidence(heard, q, k)
        side = shown.key.every(shown.key_heads // kv_heads)
        return (found[0], found[1].key) if side.verdict(heard, found[1].key) else None

    def _one_found(self, query: Optional[Rows], key: Optional[Rows]) -> None:
        """Or none of them."""
        self._not_found()
        one = query or key
        if one is not None and self._notes.pop(_NOT_FOUND, 0):
            which, other = ("W_K", "queries") if query is None else ("W_Q", "keys")
            self._notes.add(f"{which} is {one.path}, {_NO_OTHER} {other}: no spectral signals")
