#include "server/config.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/cluster/partition.h"

namespace bellwether::server {
namespace {

// One key of the file: how to read it and how to show it.
struct Field {
  std::string key;                                     // "limits.runs_live_max"
  std::function<std::string(const YAML::Node&)> read;  // "" or what is wrong
  std::function<std::string()> show;
  double limit = NAN;  // Shown among the limits too.
};

template <typename T>
Field Number(std::string key, T* target, T low, T high) {
  return {std::move(key),
          [=](const YAML::Node& node) -> std::string {
            T value{};
            if (!node.IsScalar() || !YAML::convert<T>::decode(node, value)) return "must be a number";
            if (!(value >= low && value <= high)) {
              return absl::StrCat("is ", node.Scalar(), ": must be in [", low, ", ", high, "]");
            }
            *target = value;
            return "";
          },
          [=] { return absl::StrCat(*target); }, static_cast<double>(*target)};
}

// Days in the file, seconds in `target`; 0 = for ever.
Field Days(std::string key, int64_t* target) {
  constexpr double kDaysMax = 36'500, kSeconds = 86'400;
  return {std::move(key),
          [=](const YAML::Node& node) -> std::string {
            double days = 0;
            if (!node.IsScalar() || !YAML::convert<double>::decode(node, days)) return "must be a number of days";
            if (!(days >= 0 && days <= kDaysMax)) {
              return absl::StrCat("is ", node.Scalar(), ": must be in [0, ", kDaysMax, "], 0 = for ever");
            }
            *target = days > 0 ? std::max<int64_t>(1, std::llround(days * kSeconds)) : 0;
            return "";
          },
          [=] { return absl::StrCat(static_cast<double>(*target) / kSeconds); }};
}

Field Text(std::string key, std::string* target) {
  return {std::move(key),
          [=](const YAML::Node& node) -> std::string {
            if (!node.IsScalar()) return "must be a string";
            *target = node.Scalar();
            return "";
          },
          [=] { return *target; }};
}

Field Flag(std::string key, bool* target) {
  return {std::move(key),
          [=](const YAML::Node& node) -> std::string {
            bool value = false;
            if (!node.IsScalar() || !YAML::convert<bool>::decode(node, value)) return "must be true or false";
            *target = value;
            return "";
          },
          [=] { return std::string(*target ? "true" : "false"); }};
}

// An address to tell: the fields that a webhook and an Alertmanager share.
// nullopt: `key` is none of them.
template <typename Options>
std::optional<std::string> ReadReceiver(const std::string& key, const std::string& value, Options* receiver) {
  if (key == "url") {
    const auto url = SplitUrl(value);
    if (!url.ok()) return absl::StrCat("url: ", std::string(url.status().message()));
    receiver->url = value;
  } else if (key == "name") {
    receiver->channel = value;
  } else if (key == "severity") {
    if (value != "info" && value != "warning" && value != "critical") {
      return absl::StrCat("severity is ", value, ": must be info, warning or critical");
    }
    receiver->severity_min = value == "info"      ? Severity::kInfo
                             : value == "warning" ? Severity::kWarning
                                                  : Severity::kCritical;
  } else {
    return std::nullopt;
  }
  return "";
}

std::string ReadWebhook(const std::string& key, const YAML::Node& node, WebhookOptions* webhook) {
  const std::string value = node.IsScalar() ? node.Scalar() : "";
  if (auto shared = ReadReceiver(key, value, webhook)) return *shared;
  if (key == "send_resolved") {
    return YAML::convert<bool>::decode(node, webhook->send_resolved) ? "" : "send_resolved must be true or false";
  }
  if (key == "format") {
    if (value != "alertmanager" && value != "slack")
      return absl::StrCat("format is ", value, ": must be alertmanager or slack");
    webhook->format = value == "slack" ? WebhookFormat::kSlack : WebhookFormat::kAlertmanager;
    return "";
  }
  return absl::StrCat("unknown key ", key, "; known: url, name, severity, send_resolved, format");
}

std::string ReadAlertmanager(const std::string& key, const YAML::Node& node, AlertmanagerOptions* alertmanager) {
  const std::string value = node.IsScalar() ? node.Scalar() : "";
  if (auto shared = ReadReceiver(key, value, alertmanager)) return *shared;
  if (key == "resend_seconds") {
    int64_t seconds = 0;
    if (!YAML::convert<int64_t>::decode(node, seconds) || seconds < 1 || seconds > 3600) {
      return absl::StrCat("resend_seconds is ", value, ": must be in [1, 3600]");
    }
    alertmanager->resend_ns = seconds * 1'000'000'000;
    return "";
  }
  return absl::StrCat("unknown key ", key, "; known: url, name, severity, resend_seconds");
}

// A list of at most 16 maps with a url each.
template <typename Options>
Field Receivers(std::string key, std::vector<Options>* target,
                std::string (*read)(const std::string&, const YAML::Node&, Options*)) {
  return {std::move(key),
          [=](const YAML::Node& list) -> std::string {
            if (!list.IsSequence()) return "must be a list";
            if (list.size() > 16) return absl::StrCat("holds ", list.size(), " entries: at most 16");
            std::vector<Options> receivers(list.size());
            for (size_t i = 0; i < list.size(); ++i) {
              std::string wrong = list[i].IsMap() ? "" : "must be a map with url";
              for (auto entry = list[i].begin(); wrong.empty() && entry != list[i].end(); ++entry) {
                wrong = read(entry->first.Scalar(), entry->second, &receivers[i]);
              }
              if (wrong.empty() && receivers[i].url.empty()) wrong = "has no url";
              if (!wrong.empty()) return absl::StrCat("entry ", i + 1, " ", wrong);
            }
            *target = std::move(receivers);
            return "";
          },
          [=] { return absl::StrCat(target->size(), " configured"); }};
}

std::vector<Field> Fields(ServerOptions* o) {
  Pipeline::Options& p = o->pipeline;
  std::vector<Field> fields = {
      Text("storage.path", &p.storage_path),
      Text("grpc.listen_address", &o->grpc_address),
      Number<int>("grpc.connection_age_seconds", &o->connection_age_seconds, 0, 604'800),
      Number<int>("grpc.connection_age_grace_seconds", &o->connection_age_grace_seconds, 1, 3600),
      Text("web.listen_address", &o->web_address),
      Text("web.external_url", &o->external_url),
      Number<int64_t>("web.connections_per_address_max", &o->http.connections_per_address_max, 1, 100'000),
      Flag("web.enable_reload", &o->reload_by_http),
      Flag("web.tls", &o->web_tls),
      Text("rules_file", &o->rules_file),
      Text("policy_file", &o->policy_file),
      Text("access_file", &o->access.access_file),
      Text("tokens_file", &o->access.tokens_file),
      Text("tls.cert_file", &o->tls.certificate),
      Text("tls.key_file", &o->tls.key),
      Text("tls.client_ca_file", &o->tls.client_ca),
      Text("tls.crl_file", &o->tls.crl),
      Number<unsigned>("tls.refresh_seconds", &o->tls_refresh_seconds, 1, 3600),
      Text("audit.file", &o->access.audit.path),
      Number<int64_t>("audit.bytes_max", &o->access.audit.bytes_max, 1 << 16, int64_t{1} << 36),
      Number<int>("audit.files_max", &o->access.audit.files_max, 1, 100),
      Number<int64_t>("limits.connections_max", &o->connections.all_max, 1, 1'000'000),
      Number<int64_t>("limits.connections_per_address_max", &o->connections.per_address_max, 1, 1'000'000),
      Number<size_t>("limits.runs_live_max", &p.admission.runs_live_max, 1, 100'000),
      Number<int64_t>("limits.memory_max", &p.admission.memory_max, 0, int64_t{1} << 44),
      Number<int>("limits.streams_max", &o->ingest.streams_max, 1, 100'000),
      Number<int32_t>("limits.layers_max", &p.limits.layers_max, 1, 512),
      Number<int32_t>("limits.heads_max", &p.limits.heads_max, 1, 1024),
      Number<uint32_t>("limits.ranks_max", &p.limits.world_max, 1, 4096),
      Number<size_t>("limits.queue_messages_max", &p.shard.queue_messages_max, 16, 1 << 20),
      Number<int64_t>("limits.queue_bytes_max", &p.shard.queue_bytes_max, 1 << 21, int64_t{1} << 34),
      Number<int64_t>("limits.exported_series_max", &o->exporter.series_max, 100, 1'000'000),
      Number<int64_t>("ingest.idle_ms_max", &o->ingest.idle_ms_max, 1000, 3'600'000),
      Number<int64_t>("ingest.step_deadline_ms", &p.shard.step_deadline_ms, 10, 3'600'000),
      Number<int64_t>("ingest.silence_ms_min", &p.shard.silence_ms_min, 100, 86'400'000),
      Number<int64_t>("ingest.run_silent_ms_max", &p.shard.run_silent_ms_max, 1000, int64_t{31} * 86'400'000),
      Number<int>("ingest.shards", &p.shards, 1, 64),
      Number<int64_t>("storage.wal_segment_bytes", &p.wal.segment_bytes, 1 << 21, int64_t{1} << 32),
      Number<int64_t>("storage.wal_bytes_flush", &p.wal_bytes_flush, 1 << 22, int64_t{1} << 36),
      Number<int64_t>("storage.free_bytes_min", &p.free_bytes_min, 0, int64_t{1} << 44),
      Number<double>("storage.free_ratio_min", &p.free_ratio_min, 0, 0.5),
      Number<int64_t>("storage.cache_bytes", &p.database.cache_bytes, 1 << 20, int64_t{1} << 36),
      Days("retention.raw_days", &p.retention.raw_seconds),
      Days("retention.rounded_days", &p.retention.rounded_seconds),
      Days("retention.summary_days", &p.retention.summarized_seconds),
      Number<int32_t>("export.heads_max", &o->exporter.heads.heads_top, 0, 1024),
      Text("cluster.dsn_file", &o->cluster.dsn_file),
      Text("cluster.node", &o->cluster.node),
      Text("cluster.address", &o->cluster.address),
      Text("cluster.peer_cert_file", &o->cluster.peer.certificate),
      Text("cluster.peer_key_file", &o->cluster.peer.key),
      Text("cluster.peer_ca_file", &o->cluster.peer.client_ca),
      Number<int64_t>("cluster.lease_seconds", &o->cluster.lease_seconds, 2, 60),
      Number<int>("cluster.connections", &o->cluster.connections, 1, 64),
  };
  fields.push_back({"export.per_head",
                    [o](const YAML::Node& node) -> std::string {
                      const std::string value = node.IsScalar() ? node.Scalar() : "";
                      if (value != "topk" && value != "all" && value != "none") return "must be topk, all or none";
                      o->exporter.heads.all = value == "all";
                      if (value == "none") o->exporter.heads.heads_top = 0;
                      return "";
                    },
                    [o] {
                      return o->exporter.heads.all ? "all" : o->exporter.heads.heads_top == 0 ? "none" : "topk";
                    }});
  fields.push_back({"cluster.dsn_files",
                    [o](const YAML::Node& node) -> std::string {
                      if (!node.IsSequence()) return "must be a list of files";
                      if (node.size() < 1 || node.size() > kDatabasesMax) {
                        return absl::StrCat("holds ", node.size(), " entries: must be 1 to ", kDatabasesMax);
                      }
                      std::vector<std::string> files;
                      for (size_t i = 0; i < node.size(); ++i) {
                        const std::string file = node[i].IsScalar() ? node[i].Scalar() : "";
                        if (file.empty()) return absl::StrCat("entry ", i + 1, " must be a file");
                        const auto twin = std::find(files.begin(), files.end(), file);
                        if (twin != files.end()) {
                          return absl::StrCat("entry ", i + 1, " is ", file, ", as entry ", twin - files.begin() + 1,
                                              ": each database stands once");
                        }
                        files.push_back(file);
                      }
                      o->cluster.dsn_files = files;
                      return "";
                    },
                    [o] { return absl::StrJoin(o->cluster.dsn_files, ", "); }});
  fields.push_back({"web.hosts",
                    [o](const YAML::Node& node) -> std::string {
                      if (!node.IsSequence()) return "must be a list of names";
                      if (node.size() > 64) return absl::StrCat("holds ", node.size(), " names: at most 64");
                      std::vector<std::string> names;
                      for (size_t i = 0; i < node.size(); ++i) {
                        const std::string name = node[i].IsScalar() ? node[i].Scalar() : "";
                        if (name.empty() || name.size() > 253 || name.find_first_of(":/ ") != std::string::npos) {
                          return absl::StrCat("entry ", i + 1, " is \"", name,
                                              "\": must be a name without port, of 1 to 253 characters, or \"*\"");
                        }
                        names.push_back(name);
                      }
                      o->http.hosts = names;
                      return "";
                    },
                    [o] { return absl::StrJoin(o->http.hosts, ", "); }});
  fields.push_back(Receivers("alerting.webhooks", &o->webhooks, ReadWebhook));
  fields.push_back(Receivers("alerting.alertmanagers", &o->alertmanagers, ReadAlertmanager));
  return fields;
}

// Visits every leaf: a known key, or a map on the way to one.
void Visit(const YAML::Node& node, const std::string& prefix, const std::string& path, std::vector<Field>* fields,
           std::vector<std::string>* findings) {
  const auto report = [&](const YAML::Node& at, const std::string& what) {
    findings->push_back(absl::StrCat(path, ":", at.Mark().line + 1, ":", at.Mark().column + 1, ": ", what));
  };
  if (!node.IsMap()) {
    report(node, absl::StrCat(prefix.empty() ? "the file" : prefix, " must be a map"));
    return;
  }
  std::set<std::string> seen;
  for (const auto& entry : node) {
    const std::string key = prefix.empty() ? entry.first.Scalar() : absl::StrCat(prefix, ".", entry.first.Scalar());
    if (!seen.insert(key).second) {
      report(entry.first, absl::StrCat(key, " stands twice"));
      continue;
    }
    Field* exact = nullptr;
    bool is_section = false;
    for (Field& field : *fields) {
      if (field.key == key) exact = &field;
      if (field.key.rfind(key + ".", 0) == 0) is_section = true;
    }
    if (exact != nullptr) {
      const std::string wrong = exact->read(entry.second);
      if (!wrong.empty()) report(entry.second, absl::StrCat(key, " ", wrong));
    } else if (is_section) {
      Visit(entry.second, key, path, fields, findings);
    } else {
      report(entry.first, absl::StrCat("unknown key ", key));
    }
  }
}

}  // namespace

absl::Status ReadConfig(const std::string& path, ServerOptions* options) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  std::stringstream text;
  text << file.rdbuf();
  ServerOptions changed = *options;
  std::vector<std::string> findings;
  try {
    const YAML::Node root = YAML::Load(text.str());
    if (root.IsNull()) return absl::OkStatus();
    std::vector<Field> fields = Fields(&changed);
    Visit(root, "", path, &fields, &findings);
  } catch (const YAML::Exception& error) {
    findings.push_back(absl::StrCat(path, ":", error.mark.line + 1, ":", error.mark.column + 1, ": ", error.msg));
  }
  if (changed.tls.certificate.empty() != changed.tls.key.empty()) {
    findings.push_back(absl::StrCat(path, ": tls.cert_file and tls.key_file belong together"));
  } else if (!changed.tls.on() && !changed.tls.client_ca.empty()) {
    findings.push_back(absl::StrCat(path, ": tls.client_ca_file needs tls.cert_file and tls.key_file"));
  }
  if (!changed.tls.crl.empty() && changed.tls.client_ca.empty()) {
    findings.push_back(absl::StrCat(path, ": tls.crl_file needs tls.client_ca_file, which signs it"));
  }
  if (!changed.cluster.dsn_file.empty() && !changed.cluster.dsn_files.empty()) {
    findings.push_back(absl::StrCat(path, ": cluster.dsn_file means one database, cluster.dsn_files a list of 1 to ",
                                    kDatabasesMax, ": one of the two"));
  }
  if (changed.cluster.peer.certificate.empty() != changed.cluster.peer.key.empty()) {
    findings.push_back(absl::StrCat(path, ": cluster.peer_cert_file and cluster.peer_key_file: both or neither"));
  }
  if ((changed.cluster.peer.on() || !changed.cluster.peer.client_ca.empty()) && !changed.tls.on()) {
    findings.push_back(absl::StrCat(path, ": cluster.peer_* needs tls.cert_file and tls.key_file"));
  }
  if (const absl::Status memory = RunAdmission::Check(Pipeline::AdmissionOf(changed.pipeline)); !memory.ok()) {
    findings.push_back(absl::StrCat(path, ": ", std::string(memory.message())));
  }
  const Retention::Options& retention = changed.pipeline.retention;
  if (retention.raw_seconds == 0 && retention.rounded_seconds > 0) {
    findings.push_back(absl::StrCat(path, ": retention.rounded_days is ",
                                    static_cast<double>(retention.rounded_seconds) / 86'400,
                                    ": must be 0 where retention.raw_days is 0, which keeps every value for ever"));
  }
  if (retention.rounded_seconds > 0 && retention.raw_seconds > retention.rounded_seconds) {
    findings.push_back(absl::StrCat(path, ": retention.rounded_days must be 0, or at least retention.raw_days"));
  }
  if (retention.summarized_seconds > 0 &&
      (retention.rounded_seconds == 0 || retention.rounded_seconds > retention.summarized_seconds)) {
    findings.push_back(absl::StrCat(
        path, ": retention.summary_days must be 0, or at least retention.rounded_days, which then is not 0"));
  }
  if (!changed.access.tokens_file.empty() && changed.access.access_file.empty()) {
    findings.push_back(absl::StrCat(path, ": tokens_file needs access_file, which says whose the tokens are"));
  }
  if (!findings.empty()) return absl::InvalidArgumentError(absl::StrJoin(findings, "\n"));
  // Beside the file that names it; an absolute path stays one.
  const auto place = [&path](const std::string& before, std::string* named) {
    if (*named != before) *named = (std::filesystem::path(path).parent_path() / *named).string();
  };
  place(options->rules_file, &changed.rules_file);
  place(options->policy_file, &changed.policy_file);
  place(options->access.access_file, &changed.access.access_file);
  place(options->access.tokens_file, &changed.access.tokens_file);
  place(options->access.audit.path, &changed.access.audit.path);
  place(options->cluster.dsn_file, &changed.cluster.dsn_file);
  if (changed.cluster.dsn_files != options->cluster.dsn_files) {
    for (std::string& named : changed.cluster.dsn_files) place("", &named);
  }
  place(options->cluster.peer.certificate, &changed.cluster.peer.certificate);
  place(options->cluster.peer.key, &changed.cluster.peer.key);
  place(options->cluster.peer.client_ca, &changed.cluster.peer.client_ca);
  place(options->tls.certificate, &changed.tls.certificate);
  place(options->tls.key, &changed.tls.key);
  place(options->tls.client_ca, &changed.tls.client_ca);
  place(options->tls.crl, &changed.tls.crl);
  *options = changed;
  return absl::OkStatus();
}

std::map<std::string, std::string> DescribeOptions(const ServerOptions& options) {
  ServerOptions copy = options;
  std::map<std::string, std::string> shown;
  for (const Field& field : Fields(&copy)) shown[field.key] = field.show();
  return shown;
}

std::map<std::string, double> DescribeLimits(const ServerOptions& options) {
  ServerOptions copy = options;
  std::map<std::string, double> limits;
  for (const Field& field : Fields(&copy)) {
    if (field.key.rfind("limits.", 0) == 0) limits[field.key.substr(7)] = field.limit;
  }
  return limits;
}

}  // namespace bellwether::server
