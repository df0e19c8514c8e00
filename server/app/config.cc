#include "server/app/config.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/model/partition.h"
#include "server/util/clean_text.h"
#include "server/util/host_port.h"
#include "server/util/regular_file.h"
#include "server/util/status_macros.h"
#include "server/util/strict_yaml.h"

namespace bellwether::server {
namespace {

constexpr size_t kConfigBytesMax = 256 << 10;
constexpr size_t kTextBytesMax = 4096;
constexpr size_t kReceiversMax = 16;
constexpr size_t kHostsMax = 64;
// Where the package puts deploy/webhook/slack.json.
constexpr char kSlackTemplate[] = "/usr/share/bellwether/webhook/slack.json";

// One key of the file: how to read it and how to show it.
struct Field {
  std::string key;                                           // "limits.runs_live_max"
  std::function<void(StrictYaml*, const YAML::Node&)> read;  // Reports what is wrong.
  std::function<std::string()> show;
  double limit = NAN;  // Shown among the limits too.
};

template <typename T>
Field Number(std::string key, T* target, T low, T high) {
  const auto read = [=](StrictYaml* yaml, const YAML::Node& node) {
    if constexpr (std::is_floating_point_v<T>) {
      yaml->Number(node, key, low, high, target);
    } else {
      int64_t value = 0;
      // Which some readers of YAML take for octal.
      const bool zeros = node.IsScalar() && node.Scalar().size() > 1 && node.Scalar()[0] == '0' &&
                         absl::ascii_isdigit(static_cast<unsigned char>(node.Scalar()[1]));
      if (zeros) {
        yaml->Report(node,
                     absl::StrCat(key, " = ", CleanText(node.Scalar(), kTextBytesMax), ": must be a whole number in [",
                                  low, ", ", high, "], decimal, without zeros in front"));
      } else if (yaml->Integer(node, key, static_cast<int64_t>(low), static_cast<int64_t>(high), &value)) {
        *target = static_cast<T>(value);
      }
    }
  };
  return {key, read, [=] { return absl::StrCat(*target); }, static_cast<double>(*target)};
}

// Days in the file, seconds in `target`; 0 = for ever.
Field Days(std::string key, int64_t* target) {
  constexpr double kDaysMax = 36'500, kSeconds = 86'400;
  const auto read = [=](StrictYaml* yaml, const YAML::Node& node) {
    double days = 0;
    if (!yaml->Number(node, key, 0, kDaysMax, &days)) return;
    *target = days > 0 ? std::max<int64_t>(1, std::llround(days * kSeconds)) : 0;
  };
  return {key, read, [=] { return absl::StrCat(static_cast<double>(*target) / kSeconds); }};
}

// "" is a text, too: it takes back what is built in.
bool ReadText(StrictYaml* yaml, const YAML::Node& node, const std::string& key, std::string* target) {
  if (node.IsScalar() && node.Scalar().empty()) {
    target->clear();
    return true;
  }
  return yaml->Text(node, key, kTextBytesMax, target);
}

Field Text(std::string key, std::string* target) {
  const auto read = [=](StrictYaml* yaml, const YAML::Node& node) { ReadText(yaml, node, key, target); };
  return {key, read, [=] { return *target; }};
}

// A file's name; a relative one is beside the configuration, in `folder`.
Field FileName(std::string key, std::string* target, const std::filesystem::path& folder) {
  const auto read = [=](StrictYaml* yaml, const YAML::Node& node) {
    if (ReadText(yaml, node, key, target) && !target->empty()) *target = (folder / *target).string();
  };
  return {key, read, [=] { return *target; }};
}

// A text of which `check`, called with the key too, may say what is wrong.
Field Checked(std::string key, std::string* target, absl::Status (*check)(std::string_view, std::string_view)) {
  const auto read = [=](StrictYaml* yaml, const YAML::Node& node) {
    if (!ReadText(yaml, node, key, target)) return;
    const absl::Status checked = check(key, *target);
    if (!checked.ok()) yaml->Report(node, std::string(checked.message()));
  };
  return {key, read, [=] { return *target; }};
}

Field Flag(std::string key, bool* target) {
  const auto read = [=](StrictYaml* yaml, const YAML::Node& node) { yaml->Flag(node, key, target); };
  return {key, read, [=] { return std::string(*target ? "true" : "false"); }};
}

// An address to tell: the fields that a webhook and an Alertmanager share.
// False: `key` is none of them.
template <typename Options>
bool ReadReceiver(StrictYaml* yaml, const std::string& path, const std::string& key, const YAML::Node& value,
                  Options* receiver) {
  constexpr std::array kSeverities = {"info", "warning", "critical"};
  constexpr std::array kMeant = {Severity::kInfo, Severity::kWarning, Severity::kCritical};
  if (key == "url") {
    if (!yaml->Text(value, path, kTextBytesMax, &receiver->url)) return true;
    const auto url = SplitUrl(receiver->url);
    if (!url.ok()) yaml->Report(value, absl::StrCat(path, ": ", std::string(url.status().message())));
  } else if (key == "name") {
    yaml->Text(value, path, kTextBytesMax, &receiver->channel);
  } else if (key == "severity") {
    size_t which = 0;
    if (yaml->Choice(value, path, kSeverities, &which)) receiver->severity_min = kMeant[which];
  } else {
    return false;
  }
  return true;
}

// `value` names a file beside the configuration.
void ReadTemplate(StrictYaml* yaml, const std::string& path, const YAML::Node& value,
                  const std::filesystem::path& folder, WebhookOptions* webhook) {
  std::string name;
  if (!yaml->Text(value, path, kTextBytesMax, &name)) return;
  const absl::StatusOr<RegularFile> file = ReadRegularFile((folder / name).string(), BodyTemplate::kBytesMax);
  absl::StatusOr<BodyTemplate> body = file.ok() ? BodyTemplate::Parse(file->text) : file.status();
  if (body.ok()) {
    webhook->body = *std::move(body);
  } else {
    yaml->Report(value, absl::StrCat(path, " = ", name, ": ", std::string(body.status().message())));
  }
}

bool ReadWebhook(StrictYaml* yaml, const std::string& path, const std::string& key, const YAML::Node& value,
                 const std::filesystem::path& folder, WebhookOptions* webhook) {
  if (key == "send_resolved") {
    yaml->Flag(value, path, &webhook->send_resolved);
  } else if (key == "template_file") {
    ReadTemplate(yaml, path, value, folder, webhook);
  } else if (key == "format") {
    const std::string given = value.IsScalar() ? CleanText(value.Scalar(), kTextBytesMax) : "...";
    yaml->Report(value, absl::StrCat(path, " = ", given, ": this key is gone. For Slack write template_file: ",
                                     kSlackTemplate, "; without template_file the body is Alertmanager's"));
  } else {
    return ReadReceiver(yaml, path, key, value, webhook);
  }
  return true;
}

bool ReadAlertmanager(StrictYaml* yaml, const std::string& path, const std::string& key, const YAML::Node& value,
                      AlertmanagerOptions* alertmanager) {
  if (key != "resend_seconds") return ReadReceiver(yaml, path, key, value, alertmanager);
  int64_t seconds = 0;
  Number<int64_t>(path, &seconds, 1, 3600).read(yaml, value);
  if (seconds > 0) alertmanager->resend_ns = seconds * 1'000'000'000;
  return true;
}

template <typename Options>
using ReceiverReader = std::function<bool(StrictYaml* yaml, const std::string& path, const std::string& key,
                                          const YAML::Node& value, Options* receiver)>;

// A list of maps with a url each; `read` says whether it knows a key.
template <typename Options>
Field Receivers(std::string key, std::vector<Options>* target, const char* known,
                const std::type_identity_t<ReceiverReader<Options>>& read) {
  const auto read_all = [=](StrictYaml* yaml, const YAML::Node& list) {
    std::vector<Options> receivers;
    for (const YAML::Node& item : yaml->List(list, key, kReceiversMax)) {
      Options& receiver = receivers.emplace_back();
      const std::string path = absl::StrCat(key, "[", receivers.size() - 1, "]");
      bool named = false;  // Whatever is wrong with it.
      const bool is_map =
          yaml->ForEach(item, path, [&](const std::string& name, const YAML::Node& at, const YAML::Node& value) {
            named |= name == "url";
            const std::string field = absl::StrCat(path, ".", name);
            if (!read(yaml, field, name, value, &receiver)) {
              yaml->Report(at, absl::StrCat("unknown key ", CleanText(field, kTextBytesMax), "; known: ", known));
            }
          });
      if (is_map && !named) yaml->Report(item, absl::StrCat(path, " has no url"));
    }
    *target = std::move(receivers);
  };
  return {key, read_all, [=] { return absl::StrCat(target->size(), " configured"); }};
}

// A list of `low` to `high` texts.  `check` says what is wrong with one behind those before it, "" if nothing is.
Field Texts(std::string key, std::vector<std::string>* target, size_t low, size_t high,
            std::string (*check)(const std::string& text, const std::vector<std::string>& before)) {
  const auto read = [=](StrictYaml* yaml, const YAML::Node& list) {
    std::vector<std::string> texts;
    const std::vector<YAML::Node> items = yaml->List(list, key, high);
    if (list.IsSequence() && list.size() < low) {
      yaml->Report(list, absl::StrCat(key, " holds ", list.size(), " entries: at least ", low));
    }
    for (size_t i = 0; i < items.size(); ++i) {
      const std::string path = absl::StrCat(key, "[", i, "]");
      std::string text;
      if (!yaml->Text(items[i], path, kTextBytesMax, &text)) continue;
      const std::string wrong = check(text, texts);
      if (!wrong.empty()) yaml->Report(items[i], absl::StrCat(path, " = ", text, ": ", wrong));
      texts.push_back(std::move(text));
    }
    *target = std::move(texts);
  };
  return {key, read, [=] { return absl::StrJoin(*target, ", "); }};
}

std::string CheckOnce(const std::string& text, const std::vector<std::string>& before) {
  const auto twin = std::find(before.begin(), before.end(), text);
  return twin == before.end() ? "" : absl::StrCat("stands at [", twin - before.begin(), "] already");
}

std::string CheckHostName(const std::string& name, const std::vector<std::string>& /*before*/) {
  if (name.size() <= 253 && name.find_first_of(":/ ") == std::string::npos) return "";
  return "must be a name without port, of 1 to 253 characters, or \"*\"";
}

absl::Status CheckPeerAddress(std::string_view key, std::string_view address) {
  return address.empty() ? absl::OkStatus() : CheckGrpcAddress(key, address);
}

// The one list of keys.  `folder` is where the configuration lies; only reading needs it.
std::vector<Field> Fields(ServerOptions* o, const std::filesystem::path& folder = {}) {
  Engine::Options& p = o->engine;
  const auto file = [&folder](const char* key, std::string* target) { return FileName(key, target, folder); };
  std::vector<Field> fields = {
      Text("storage.path", &p.storage_path),
      Checked("grpc.listen_address", &o->grpc_address, CheckGrpcAddress),
      Number<int>("grpc.connection_age_seconds", &o->connection_age_seconds, 0, 604'800),
      Number<int>("grpc.connection_age_grace_seconds", &o->connection_age_grace_seconds, 1, 3600),
      Checked("web.listen_address", &o->web_address, CheckWebAddress),
      Text("web.external_url", &o->external_url),
      Number<int64_t>("web.connections_per_address_max", &o->http.connections_per_address_max, 1, 100'000),
      Flag("web.enable_reload", &o->reload_by_http),
      Flag("web.tls", &o->web_tls),
      file("rules_file", &o->rules_file),
      file("policy_file", &o->policy_file),
      file("access_file", &o->access.access_file),
      file("tokens_file", &o->access.tokens_file),
      file("tls.cert_file", &o->tls.certificate),
      file("tls.key_file", &o->tls.key),
      file("tls.client_ca_file", &o->tls.client_ca),
      file("tls.crl_file", &o->tls.crl),
      Number<unsigned>("tls.refresh_seconds", &o->tls_refresh_seconds, 1, 3600),
      file("audit.file", &o->access.audit.path),
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
      Number<int64_t>("limits.query_memory_max", &o->query_engine.memory.bytes_max, 1 << 24, int64_t{1} << 40),
      Number<uint64_t>("limits.events_per_run_max", &p.events_per_run_max, 16, 10'000'000),
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
      Number<int32_t>("export.rows_max", &o->exporter.rows.rows_top, 0, 1024),
      file("cluster.dsn_file", &o->cluster.dsn_file),
      Text("cluster.node", &o->cluster.node),
      Checked("cluster.address", &o->cluster.address, CheckPeerAddress),
      file("cluster.peer_cert_file", &o->cluster.peer.certificate),
      file("cluster.peer_key_file", &o->cluster.peer.key),
      file("cluster.peer_ca_file", &o->cluster.peer.client_ca),
      Number<int64_t>("cluster.lease_seconds", &o->cluster.lease_seconds, 2, 60),
      Number<int>("cluster.connections", &o->cluster.connections, 1, 64),
  };
  fields.push_back({"export.per_head",
                    [o](StrictYaml* yaml, const YAML::Node& node) {
                      constexpr std::array kWords = {"topk", "all", "none"};
                      size_t which = 0;
                      if (!yaml->Choice(node, "export.per_head", kWords, &which)) return;
                      o->exporter.heads.all = which == 1;
                      if (which == 2) o->exporter.heads.heads_top = 0;
                    },
                    [o] {
                      return o->exporter.heads.all ? "all" : o->exporter.heads.heads_top == 0 ? "none" : "topk";
                    }});
  Field dsn_files = Texts("cluster.dsn_files", &o->cluster.dsn_files, 1, kDatabasesMax, CheckOnce);
  dsn_files.read = [o, folder, texts = dsn_files.read](StrictYaml* yaml, const YAML::Node& node) {
    texts(yaml, node);
    for (std::string& name : o->cluster.dsn_files) name = (folder / name).string();
  };
  fields.push_back(std::move(dsn_files));
  fields.push_back(Texts("web.hosts", &o->http.hosts, 0, kHostsMax, CheckHostName));
  fields.push_back(
      Receivers("alerting.webhooks", &o->webhooks, "url, name, severity, send_resolved, template_file",
                [folder](StrictYaml* yaml, const std::string& path, const std::string& key, const YAML::Node& value,
                         WebhookOptions* webhook) { return ReadWebhook(yaml, path, key, value, folder, webhook); }));
  fields.push_back(
      Receivers("alerting.alertmanagers", &o->alertmanagers, "url, name, severity, resend_seconds", ReadAlertmanager));
  return fields;
}

// Visits every leaf: a known key, or a map on the way to one.  Returns how many leaves were known.
size_t ReadKeys(StrictYaml* yaml, const YAML::Node& node, const std::string& prefix, const std::vector<Field>& fields) {
  size_t known = 0;
  yaml->ForEach(node, prefix, [&](const std::string& name, const YAML::Node& at, const YAML::Node& value) {
    const std::string key = prefix.empty() ? name : absl::StrCat(prefix, ".", name);
    const auto exact = std::find_if(fields.begin(), fields.end(), [&](const Field& field) { return field.key == key; });
    if (exact != fields.end()) {
      ++known;
      exact->read(yaml, value);
    } else if (std::any_of(fields.begin(), fields.end(),
                           [&](const Field& field) { return field.key.rfind(key + ".", 0) == 0; })) {
      known += ReadKeys(yaml, value, key, fields);
    } else {
      yaml->Report(at, absl::StrCat("unknown key ", CleanText(key, kTextBytesMax)));
    }
  });
  return known;
}

}  // namespace

absl::Status CheckGrpcAddress(std::string_view key, std::string_view address) {
  if (address.starts_with("unix:")) return absl::OkStatus();
  return SplitHostPort(key, address).status();
}

absl::Status CheckWebAddress(std::string_view key, std::string_view address) {
  return address.empty() ? absl::OkStatus() : SplitHostPort(key, address).status();
}

absl::StatusOr<size_t> ReadConfig(const std::string& path, ServerOptions* options) {
  BW_ASSIGN_OR_RETURN(const RegularFile file, ReadRegularFile(path, kConfigBytesMax));
  ServerOptions changed = *options;
  StrictYaml yaml(path);
  const std::optional<YAML::Node> root = yaml.Load(file.text, kConfigBytesMax);
  if (!root) return yaml.status();
  const size_t known = ReadKeys(&yaml, *root, "", Fields(&changed, std::filesystem::path(path).parent_path()));
  std::vector<std::string> findings;
  if (!yaml.clean()) findings.push_back(std::string(yaml.status().message()));
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
  if (const absl::Status memory = RunAdmission::Check(Engine::AdmissionOf(changed.engine)); !memory.ok()) {
    findings.push_back(absl::StrCat(path, ": ", std::string(memory.message())));
  }
  const Retention::Options& retention = changed.engine.retention;
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
  *options = changed;
  return known;
}

std::map<std::string, std::string> DescribeOptions(const ServerOptions& options) {
  ServerOptions copy = options;
  std::map<std::string, std::string> shown;
  for (const Field& field : Fields(&copy)) shown[field.key] = CleanText(field.show(), kConfigBytesMax);
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
