"""A dashboard of the Grafana Foundation SDK with what all of ours share.

The SDK knows names and types of the JSON.  Our settings stand here: one data source variable,
marks of alerts, links to the other boards.  A panel cannot be made without title, description and
unit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import common as parts
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

TAG = "bellwether"
DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
AnyPanel = TypeVar("AnyPanel", stat.Panel, statetimeline.Panel, table.Panel, timeseries.Panel)


# What a stage is called, and its colour.  -1: nothing was found, and not everything is judged: that is not health.
STAGES = {
    -1: ("Judged in part", "blue"),
    0: ("Healthy", "green"),
    1: ("Drift", "orange"),
    2: ("Ties", "orange"),
    3: ("Weights", "red"),
    4: ("Scores", "red"),
    5: ("Loss", "dark-red"),
}
STAGE_WORDS = dashboard.ValueMap(
    options={
        str(stage): dashboard.ValueMappingResult(text=text, color=color, index=index)
        for index, (stage, (text, color)) in enumerate(STAGES.items())
    }
)
STAGE_HELP = (
    "Drift, then ties and bias, then weights that are pushed, scores that are too large, and the loss. Harm begins with "
    "weights."
)


@dataclass(frozen=True)
class Look:
    """How a panel stands on the board and colours its values.

    Green, then orange from `warn` on, then red from `critical` on.  `least`: red below it, green
    from it on.  `idle`: a value below one says nothing, neither good nor bad.
    """

    unit: str
    width: int = 12
    height: int = 8
    warn: float | None = None
    critical: float | None = None
    least: float | None = None
    idle: bool = False
    log: bool = False

    def steps(self) -> list[dashboard.Threshold]:
        """Grafana's thresholds, the lowest first."""
        if self.least is not None:
            return [dashboard.Threshold(value=None, color="red"), dashboard.Threshold(value=self.least, color="green")]
        if self.idle:
            return [dashboard.Threshold(value=None, color="text"), dashboard.Threshold(value=1, color="green")]
        steps = [dashboard.Threshold(value=None, color="green")]
        if self.warn is not None:
            steps.append(dashboard.Threshold(value=self.warn, color="orange"))
        if self.critical is not None:
            steps.append(dashboard.Threshold(value=self.critical, color="red"))
        return steps


@dataclass(frozen=True)
class Marks(Builder[dashboard.AnnotationQuery]):
    """Marks on every panel, of a query."""

    name: str
    expr: str
    color: str
    title: str
    text: str = ""

    def build(self) -> dashboard.AnnotationQuery:
        """The SDK's annotation, and what only Prometheus' annotations have."""
        marks = self

        class Annotation(dashboard.AnnotationQuery):
            def to_json(self) -> dict[str, object]:
                return {**super().to_json(), "step": "60s", "titleFormat": marks.title, "textFormat": marks.text}

        return Annotation(name=self.name, datasource=DATASOURCE, icon_color=self.color, expr=self.expr)


def query(expr: str, legend: str = "") -> Dataquery:
    """A query over the time range."""
    return Dataquery().expr(expr).legend_format(legend).datasource(DATASOURCE).range()


def query_now(expr: str) -> Dataquery:
    """A query of the newest values, as the rows of a table."""
    return Dataquery().expr(expr).datasource(DATASOURCE).format(PromQueryFormat.TABLE).instant()


def link_to_run(run: str) -> build.DashboardLink:
    """From a value to its run; `run` is where Grafana finds the name."""
    return build.DashboardLink("Run").url(f"/d/bellwether-run?var-run={run}&${{__url_time_range}}")


class Board:
    """A dashboard under construction; the SDK places panels from left to right on 24 columns."""

    def __init__(self, uid: str, title: str, description: str) -> None:
        self.uid = uid
        self._ids = 0
        self._board = (
            build.Dashboard(title)
            .uid(uid)
            .description(description)
            .tags([TAG])
            .readonly()
            .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
            .refresh("30s")
            .time("now-6h", "now")
            .timezone("browser")
            .with_variable(build.DatasourceVariable("datasource").label("Data source").type("prometheus"))
            .link(
                build.DashboardLink("Bellwether")
                .type(dashboard.DashboardLinkType.DASHBOARDS)
                .tags([TAG])
                .include_vars(True)
                .keep_time(True)
            )
        )

    def variable(self, name: str, label: str, values: str, several: bool = False) -> None:
        """A variable that Prometheus fills, again when the time range changes."""
        variable = (
            build.QueryVariable(name)
            .label(label)
            .datasource(DATASOURCE)
            .query({"query": values, "refId": name})
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(dashboard.VariableSort.NUMERICAL_ASC if several else dashboard.VariableSort.ALPHABETICAL_ASC)
            .multi(several)
            .include_all(several)
        )
        if several:
            variable.current(dashboard.VariableOption(text="All", value="$__all"))
        self._board.with_variable(variable)

    def marks(self, name: str, expr: str, color: str, title: str, text: str = "") -> None:
        """Marks on every panel."""
        self._board.annotation(Marks(name, expr, color, title, text))

    def row(self, title: str) -> None:
        """A heading over what follows."""
        self._ids += 1
        self._board.with_row(build.Row(title).id(self._ids))

    def stat(self, title: str, description: str, target: Dataquery, look: Look) -> stat.Panel:
        """One number, the newest."""
        return (
            self._add(stat.Panel(), title, description, look, target)
            .reduce_options(parts.ReduceDataOptions().calcs(["lastNotNull"]))
            .color_mode(common.BigValueColorMode.VALUE)
        )

    def states(self, title: str, description: str, target: Dataquery, look: Look) -> statetimeline.Panel:
        """Which state held when, in words; a row each."""
        return (
            self._add(statetimeline.Panel(), title, description, look, target)
            .mappings([STAGE_WORDS])
            .color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
            .merge_values(True)
            .show_value(common.VisibilityMode.AUTO)
            .row_height(0.8)
            .legend(
                parts.VizLegendOptions()
                .display_mode(common.LegendDisplayMode.LIST)
                .placement(common.LegendPlacement.BOTTOM)
                .show_legend(False)
                .calcs([])
            )
        )

    def lines(self, title: str, description: str, look: Look, *targets: Dataquery) -> timeseries.Panel:
        """Lines over time."""
        dashed = (
            common.GraphThresholdsStyleMode.DASHED if len(look.steps()) > 1 else common.GraphThresholdsStyleMode.OFF
        )
        panel = (
            self._add(timeseries.Panel(), title, description, look, *targets)
            .line_width(1)
            .fill_opacity(0)
            .show_points(common.VisibilityMode.NEVER)
            .span_nulls(300000)
            .thresholds_style(parts.GraphThresholdsStyleConfig().mode(dashed))
            .legend(
                parts.VizLegendOptions()
                .display_mode(common.LegendDisplayMode.LIST)
                .placement(common.LegendPlacement.BOTTOM)
                .show_legend(True)
                .calcs([])
            )
            .tooltip(parts.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
        )
        if look.log:
            panel.scale_distribution(parts.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10))
        return panel

    def table(self, title: str, description: str, target: Dataquery, look: Look) -> table.Panel:
        """The newest values as rows."""
        return self._add(table.Panel(), title, description, look, target)

    def _add(self, panel: AnyPanel, title: str, description: str, look: Look, *targets: Dataquery) -> AnyPanel:
        self._ids += 1
        panel.id(self._ids).title(title).description(description).datasource(DATASOURCE)
        panel.span(look.width).height(look.height).unit(look.unit)
        panel.thresholds(build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(look.steps()))
        for number, target in enumerate(targets):
            panel.with_target(target.ref_id(chr(ord("A") + number)))
        # The SDK builds here; what the caller sets afterwards reaches the same object.
        self._board.with_panel(panel)
        return panel

    def json(self) -> str:
        """The text that Grafana loads."""
        text: Any = json.dumps(self._board.build(), cls=JSONEncoder, indent=1, ensure_ascii=False, sort_keys=True)
        return f"{text}\n"
