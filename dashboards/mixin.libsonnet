// Dashboards and rules for those who deploy by Jsonnet: the usual fields of a mixin.
//   (import 'bellwether/dashboards/mixin.libsonnet').grafanaDashboards
// The files are the same that Grafana and Prometheus load without Jsonnet.
local groups = std.parseYaml(importstr 'alerts/rules.yml').groups;
local alerts(group) = std.objectHas(group.rules[0], 'alert');

{
  grafanaDashboards+:: {
    'bellwether-overview.json': import 'grafana/bellwether-overview.json',
    'bellwether-run.json': import 'grafana/bellwether-run.json',
    'bellwether-server.json': import 'grafana/bellwether-server.json',
  },
  prometheusAlerts+:: { groups+: [group for group in groups if alerts(group)] },
  prometheusRules+:: { groups+: [group for group in groups if !alerts(group)] },
}
