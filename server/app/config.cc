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

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/model/partition.h"
#include "server/util/clean_text.h"
#include "server/util/host_port.h"
#include "server/util/nearest_word.h"
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

// One key of the file: how to read it, how to show it, and what docs/reference/configuration.md says of it.
struct Field {
  std::string key;                                           // "limits.runs_live_max"
  std::function<void(StrictYaml*, const YAML::Node&)> read;  // Reports what is wrong.
  std::function<std::string()> show;
  std::string legal;
  double limit = NAN;  // Shown among the limits too.
  std::string unit = {}, meaning = {}, built_in = {};
  ConfigChange change = ConfigChange::kRestart;

  // `built_in_said`: the default in words, where the value alone says too little.
  Field Says(std::string unit_said, std::string meaning_said, std::string built_in_said = "") && {
    unit = std::move(unit_said);
    meaning = std::move(meaning_said);
    built_in = std::move(built_in_said);
    return std::move(*this);
  }
  Field Contents(ConfigChange when) && {
    change = when;
    return std::move(*this);
  }
};

template <typename T>
std::string RangeText(T low, T high) {
  return absl::StrCat(low, " to ", high, std::is_floating_point_v<T> ? "" : ", whole");
}

template <typename T>
Field Number(std::string key, T* target, T low, T high) {
  const auto read = [=](StrictYaml* yaml, const YAML::Node& node) {
    if constexpr (std::is_floating_point_v<T>) {
      yaml->Number(node, key, low, high, target);
    } else {
      int64_t value = 0;
      if (yaml->Integer(node, key, static_cast<int64_t>(low), static_cast<int64_t>(high), &value)) {
        *target = static_cast<T>(value);
      }
    }
  };
  return {key, read, [=] { return absl::StrCat(*target); }, RangeText(low, high), static_cast<double>(*target)};
}

// Days in the file, seconds in `target`; 0 = for ever.
Field Days(std::string key, int64_t* target) {
  constexpr double kDaysMax = 36'500, kSeconds = 86'400;
  const auto read = [=](StrictYaml* yaml, const YAML::Node& node) {
    double days = 0;
    if (!yaml->Number(node, key, 0, kDaysMax, &days)) return;
    *target = days > 0 ? std::max<int64_t>(1, std::llround(days * kSeconds)) : 0;
  };
  return {key, read, [=] { return absl::StrCat(static_cast<double>(*target) / kSeconds); }, RangeText(0.0, kDaysMax)};
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
  return {key, read, [=] { return *target; }, "text"};
}

// A file's name; a relative one is beside the configuration, in `folder`.
Field FileName(std::string key, std::string* target, const std::filesystem::path& folder) {
  const auto read = [=](StrictYaml* yaml, const YAML::Node& node) {
    if (ReadText(yaml, node, key, target) && !target->empty()) *target = (folder / *target).string();
  };
  return {key, read, [=] { return *target; }, "file"};
}

// An address of which `check`, called with the key too, may say what is wrong.
Field Address(std::string key, std::string* target, absl::Status (*check)(std::string_view, std::string_view),
              std::string legal) {
  const auto read = [=](StrictYaml* yaml, const YAML::Node& node) {
    if (!ReadText(yaml, node, key, target)) return;
    const absl::Status checked = check(key, *target);
    if (!checked.ok()) yaml->Report(node, std::string(checked.message()));
  };
  return {key, read, [=] { return *target; }, std::move(legal)};
}

Field Flag(std::string key, bool* target) {
  const auto read = [=](StrictYaml* yaml, const YAML::Node& node) { yaml->Flag(node, key, target); };
  return {key, read, [=] { return std::string(*target ? "true" : "false"); }, "true or false"};
}

// One key of an address to tell: a webhook or an Alertmanager.
template <typename Options>
struct ReceiverKey {
  std::string name, built_in, legal, unit, meaning;  // Without a meaning: a key that is gone.
  std::function<void(StrictYaml* yaml, const std::string& path, const YAML::Node& value, Options* receiver)> read;
};

// Those that both have.
template <typename Options>
std::vector<ReceiverKey<Options>> SharedReceiverKeys() {
  const auto read_url = [](StrictYaml* yaml, const std::string& path, const YAML::Node& value, Options* receiver) {
    if (!yaml->Text(value, path, kTextBytesMax, &receiver->url)) return;
    const auto url = SplitUrl(receiver->url);
    if (!url.ok()) yaml->Report(value, absl::StrCat(path, ": ", std::string(url.status().message())));
  };
  const auto read_proxy = [](StrictYaml* yaml, const std::string& path, const YAML::Node& value, Options* receiver) {
    std::string text;
    if (!yaml->Text(value, path, kTextBytesMax, &text)) return;
    const auto proxy = SplitProxyUrl(text);
    if (proxy.ok()) {
      receiver->proxy = *proxy;
    } else {
      yaml->Report(value, absl::StrCat(path, ": ", std::string(proxy.status().message())));
    }
  };
  const auto read_name = [](StrictYaml* yaml, const std::string& path, const YAML::Node& value, Options* receiver) {
    yaml->Text(value, path, kTextBytesMax, &receiver->channel);
  };
  const auto read_severity = [](StrictYaml* yaml, const std::string& path, const YAML::Node& value, Options* receiver) {
    constexpr std::array kSeverities = {"info", "warning", "critical"};
    constexpr std::array kMeant = {Severity::kInfo, Severity::kWarning, Severity::kCritical};
    size_t which = 0;
    if (yaml->Choice(value, path, kSeverities, &which)) receiver->severity_min = kMeant[which];
  };
  return {
      {"url", "must be said", "http:// or https:// address", "", "Where alerts are sent.", read_url},
      {"proxy_url", "none", "http:// address", "",
       "HTTP proxy by which the address is reached; https goes through a tunnel that it cannot read.", read_proxy},
      {"name", Options().channel, "text", "", "What logs, counters and receivers call this address.", read_name},
      {"severity", "warning", "info, warning or critical", "", "Alerts below this severity are not sent.",
       read_severity},
  };
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

std::vector<ReceiverKey<WebhookOptions>> WebhookKeys(const std::filesystem::path& folder) {
  auto keys = SharedReceiverKeys<WebhookOptions>();
  keys.push_back({"send_resolved", WebhookOptions().send_resolved ? "true" : "false", "true or false", "",
                  "Whether the end of an alert is sent, too.",
                  [](StrictYaml* yaml, const std::string& path, const YAML::Node& value, WebhookOptions* webhook) {
                    yaml->Flag(value, path, &webhook->send_resolved);
                  }});
  keys.push_back({"template_file", "none: Alertmanager's body", "file", "",
                  absl::StrCat("JSON of the body that is sent, with placeholders; for Slack ", kSlackTemplate, "."),
                  [folder](StrictYaml* yaml, const std::string& path, const YAML::Node& value,
                           WebhookOptions* webhook) { ReadTemplate(yaml, path, value, folder, webhook); }});
  keys.push_back({"format", "", "", "", "",
                  [](StrictYaml* yaml, const std::string& path, const YAML::Node& value, WebhookOptions*) {
                    const std::string given = value.IsScalar() ? CleanText(value.Scalar(), kTextBytesMax) : "...";
                    yaml->Report(value, absl::StrCat(path, " = ", given, ": this key is gone. For Slack write ",
                                                     "template_file: ", kSlackTemplate,
                                                     "; without template_file the body is Alertmanager's"));
                  }});
  return keys;
}

std::vector<ReceiverKey<AlertmanagerOptions>> AlertmanagerKeys() {
  constexpr int64_t kSecondsMax = 3600, kSecond = 1'000'000'000;
  auto keys = SharedReceiverKeys<AlertmanagerOptions>();
  keys.push_back({"resend_seconds", absl::StrCat(AlertmanagerOptions().resend_ns / kSecond),
                  RangeText(int64_t{1}, kSecondsMax), "seconds",
                  "How often an alert that fires is sent again, as an Alertmanager expects.",
                  [](StrictYaml* yaml, const std::string& path, const YAML::Node& value, AlertmanagerOptions* to) {
                    int64_t seconds = 0;
                    Number<int64_t>(path, &seconds, 1, kSecondsMax).read(yaml, value);
                    if (seconds > 0) to->resend_ns = seconds * kSecond;
                  }});
  return keys;
}

template <typename Options>
std::vector<std::string> KnownNames(const std::vector<ReceiverKey<Options>>& keys) {
  std::vector<std::string> names;
  for (const ReceiverKey<Options>& key : keys) {
    if (!key.meaning.empty()) names.push_back(key.name);
  }
  return names;
}

// ": did you mean `before` and one of `words`?", or "".
std::string DidYouMean(const std::string& typed, const std::vector<std::string>& words, const std::string& before) {
  const std::string meant = NearestWord(typed, words);
  return meant.empty() ? "" : absl::StrCat(": did you mean ", before, meant, "?");
}

// A list of maps with a url each.
template <typename Options>
Field Receivers(std::string key, std::vector<Options>* target, const std::vector<ReceiverKey<Options>>& keys) {
  const auto read_all = [=](StrictYaml* yaml, const YAML::Node& list) {
    std::vector<Options> receivers;
    for (const YAML::Node& item : yaml->List(list, key, kReceiversMax)) {
      Options& receiver = receivers.emplace_back();
      const std::string path = absl::StrCat(key, "[", receivers.size() - 1, "]");
      bool named = false;  // Whatever is wrong with it.
      const auto read_key = [&](const std::string& name, const YAML::Node& at, const YAML::Node& value) {
        named |= name == "url";
        const std::string field = absl::StrCat(path, ".", name);
        const auto known = std::find_if(keys.begin(), keys.end(), [&](const auto& one) { return one.name == name; });
        if (known != keys.end()) return known->read(yaml, field, value, &receiver);
        const std::vector<std::string> names = KnownNames(keys);
        yaml->Report(at, absl::StrCat("unknown key ", CleanText(field, kTextBytesMax),
                                      DidYouMean(name, names, path + "."), "; known: ", absl::StrJoin(names, ", ")));
      };
      const bool is_map = yaml->ForEach(item, path, read_key);
      if (is_map && !named) yaml->Report(item, absl::StrCat(path, " has no url"));
    }
    *target = std::move(receivers);
  };
  const auto show = [=] { return target->empty() ? "" : absl::StrCat(target->size(), " configured"); };
  return {key, read_all, show, absl::StrCat("list of at most ", kReceiversMax, " maps")};
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
  const auto show = [=] { return absl::StrJoin(*target, ", "); };
  return {key, read, show, absl::StrCat("list of ", low, " to ", high, " texts")};
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
  constexpr auto kReload = ConfigChange::kReload;
  constexpr auto kReloadOrSeen = ConfigChange::kReloadOrSeen;
  constexpr auto kSeen = ConfigChange::kSeen;
  std::vector<Field> fields = {
      file("rules_file", &o->rules_file)
          .Says("", "Thresholds and own rules ([rules](rules.md)).", "none: the built-in rules")
          .Contents(kReload),
      file("policy_file", &o->policy_file)
          .Says("", "What may be done about alerts ([policy](policy.md)).",
                "none: the built-in one, which only observes")
          .Contents(kReload),
      file("access_file", &o->access.access_file)
          .Says("", "Which identity may do what ([identities](../operate/security.md)).",
                "none: no identity is asked for")
          .Contents(kReloadOrSeen),
      file("tokens_file", &o->access.tokens_file)
          .Says("", "Hashes of tokens, as `bellwether token` writes them; needs `access_file`.")
          .Contents(kReloadOrSeen),
      Address("grpc.listen_address", &o->grpc_address, CheckGrpcAddress, "host:port or unix:/path")
          .Says("", "Where trainers, senders and the command connect."),
      Number<int>("grpc.connection_age_seconds", &o->connection_age_seconds, 0, 604'800)
          .Says(
              "seconds",
              "A connection of this age, give or take a tenth, is closed so that clients connect anew; 0 means never."),
      Number<int>("grpc.connection_age_grace_seconds", &o->connection_age_grace_seconds, 1, 3600)
          .Says("seconds", "How long calls under way may still take on a connection that is being closed for its age."),
      Address("web.listen_address", &o->web_address, CheckWebAddress, "host:port, or \"\" for none")
          .Says("", "Where the page, `/metrics` and the JSON API listen."),
      Texts("web.hosts", &o->http.hosts, 0, kHostsMax, CheckHostName)
          .Says("",
                "Names, without port, by which browsers and Prometheus may call this server beside its addresses; `*` "
                "allows any."),
      Address("web.external_url", &o->external_url, CheckPageUrl, "https://...")
          .Says("",
                "The page's address as others reach it: links in notifications begin with it, and trainers ask it for "
                "their alerts (`on_alert=`, the lines on the terminal), so that they must reach it, too. Behind TLS it "
                "begins with https.",
                "made of the listen address; a trainer takes the host by which it reaches gRPC for 0.0.0.0"),
      Number<int64_t>("web.connections_per_address_max", &o->http.connections_per_address_max, 1, 100'000)
          .Says("connections",
                "HTTP connections of one address; behind a reverse proxy, whose address all callers have, say 344."),
      Flag("web.enable_reload", &o->reload_by_http)
          .Says("", "Whether `POST /-/reload` reads the rules, policy and access files again."),
      Flag("web.tls", &o->web_tls)
          .Says(
              "",
              "Whether the page speaks TLS where `tls.cert_file` is set; `false` is for a proxy on the same machine."),
      file("tls.cert_file", &o->tls.certificate)
          .Says("", "PEM: this server's certificate, and the ones that signed it.", "none: plaintext, on loopback only")
          .Contents(kSeen),
      file("tls.key_file", &o->tls.key)
          .Says("", "PEM: the certificate's key, which no other user may read.")
          .Contents(kSeen),
      file("tls.client_ca_file", &o->tls.client_ca)
          .Says("", "PEM: the authorities of clients' certificates; gRPC then asks every caller for one.",
                "none: no certificate is asked for")
          .Contents(kSeen),
      file("tls.crl_file", &o->tls.crl)
          .Says(
              "",
              "PEM: lists of certificates that were taken back (`bellwether cert revoke`); needs `tls.client_ca_file`.")
          .Contents(kSeen),
      Number<unsigned>("tls.refresh_seconds", &o->tls_refresh_seconds, 1, 3600)
          .Says("seconds", "How often the TLS files are looked at for changes."),
      file("audit.file", &o->access.audit.path)
          .Says("", "Log of every change with its identity, as lines of JSON.", "`audit.log` in `storage.path`"),
      Number<int64_t>("audit.bytes_max", &o->access.audit.bytes_max, 1 << 16, int64_t{1} << 36)
          .Says("bytes", "Size at which the audit log is renamed and a new one begins."),
      Number<int>("audit.files_max", &o->access.audit.files_max, 1, 100)
          .Says("files", "How many audit logs are kept; the oldest goes."),
      Address("alerting.runbook_url", &o->runbook_url, CheckPageUrl, "https://...")
          .Says("",
                "Where runbooks are, for links in notifications; `{name}` stands for the runbook's name, which else "
                "follows behind a slash.",
                "those of the page, `web.external_url` with `#/runbook`"),
      Receivers("alerting.webhooks", &o->webhooks, WebhookKeys(folder))
          .Says("", "Addresses that alerts are posted to; the keys of one are in the next table."),
      Receivers("alerting.alertmanagers", &o->alertmanagers, AlertmanagerKeys())
          .Says("", "Alertmanagers that alerts are sent to; the keys of one are in the last table."),
      Number<int64_t>("limits.connections_max", &o->connections.all_max, 1, 1'000'000)
          .Says("connections",
                "gRPC connections at once; never more than a quarter of the descriptors that the process may have."),
      Number<int64_t>("limits.connections_per_address_max", &o->connections.per_address_max, 1, 1'000'000)
          .Says("connections",
                "gRPC connections of one address: of a /64 network with IPv6, of a user on a Unix socket."),
      Number<int>("limits.streams_max", &o->ingest.streams_max, 1, 100'000)
          .Says("streams", "Ranks that send at the same time."),
      Number<size_t>("limits.runs_live_max", &p.admission.runs_live_max, 1, 100'000)
          .Says("runs", "Runs that are watched at the same time; another one is refused."),
      Number<int64_t>("limits.memory_max", &p.admission.memory_max, 0, int64_t{1} << 44)
          .Says("bytes", "Memory that the whole server may take, answers among it; a run that does not fit is refused.",
                "0: three quarters of the machine's or the control group's memory, and at least 512 MiB for runs"),
      Number<int32_t>("limits.layers_max", &p.limits.layers_max, 1, 512)
          .Says("layers", "Layers of a run; a larger model is refused."),
      Number<int32_t>("limits.heads_max", &p.limits.heads_max, 1, 1024)
          .Says("heads", "Heads of a layer; a larger model is refused."),
      Number<uint32_t>("limits.ranks_max", &p.limits.world_max, 1, 4096)
          .Says("ranks", "Ranks of a run; a larger job is refused."),
      Number<size_t>("limits.queue_messages_max", &p.shard.queue_messages_max, 16, 1 << 20)
          .Says("messages", "Messages that wait for one shard; beyond it senders wait."),
      Number<int64_t>("limits.queue_bytes_max", &p.shard.queue_bytes_max, 1 << 21, int64_t{1} << 34)
          .Says("bytes", "Bytes of messages that wait for one shard; beyond it senders wait."),
      Number<int64_t>("limits.query_memory_max", &o->query_engine.memory.bytes_max, 1 << 24, int64_t{1} << 40)
          .Says("bytes",
                "Memory of all queries under way together; one that does not fit waits up to two seconds and is then "
                "refused. Lists have a quarter as much on top."),
      Number<uint64_t>("limits.events_per_run_max", &p.events_per_run_max, 16, 10'000'000)
          .Says("events", "Events that are kept of a run; the last one then says that there were more."),
      Number<int64_t>("limits.exported_series_max", &o->exporter.series_max, 100, 1'000'000)
          .Says("series",
                "Series on `/metrics`; beyond it heads, rows, layers of healthy runs, ended runs and alerts leave, in "
                "this order."),
      Number<int64_t>("ingest.idle_ms_max", &o->ingest.idle_ms_max, 1000, 3'600'000)
          .Says("milliseconds", "A stream from which nothing came for so long is cut; its sender connects anew."),
      Number<int64_t>("ingest.step_deadline_ms", &p.shard.step_deadline_ms, 10, 3'600'000)
          .Says("milliseconds",
                "How long a step waits for ranks that have not reported it before it is judged without them."),
      Number<int64_t>("ingest.silence_ms_min", &p.shard.silence_ms_min, 100, 86'400'000)
          .Says("milliseconds",
                "A rank counts as silent after this, or after several of its usual intervals where those are longer."),
      Number<int64_t>("ingest.run_silent_ms_max", &p.shard.run_silent_ms_max, 1000, int64_t{31} * 86'400'000)
          .Says("milliseconds", "A run that sends nothing for so long counts as ended; it goes on if it sends again."),
      Number<int>("ingest.shards", &p.shards, 1, 64)
          .Says("threads", "Threads that judge runs; each run belongs to one."),
      Text("storage.path", &p.storage_path)
          .Says("", "Folder of log and database.",
                "`$STATE_DIRECTORY` of the service, or `bellwether/server` in `$XDG_STATE_HOME` or `~/.local/state`"),
      Number<int64_t>("storage.wal_segment_bytes", &p.wal.segment_bytes, 1 << 21, int64_t{1} << 32)
          .Says("bytes", "Size of a file of the write-ahead log; two are laid out ahead."),
      Number<int64_t>("storage.wal_bytes_flush", &p.wal_bytes_flush, 1 << 22, int64_t{1} << 36)
          .Says("bytes",
                "Length of the write-ahead log from which its contents move to the database before the usual minute is "
                "over."),
      Number<int64_t>("storage.free_bytes_min", &p.free_bytes_min, 0, int64_t{1} << 44)
          .Says("bytes",
                "Space that stays free on the data's file system; the smaller of this and `storage.free_ratio_min` "
                "counts."),
      Number<double>("storage.free_ratio_min", &p.free_ratio_min, 0, 0.5)
          .Says("share of the disk",
                "Below the smaller of this and `storage.free_bytes_min` nothing is acknowledged until a tenth more is "
                "free."),
      Number<int64_t>("storage.cache_bytes", &p.database.cache_bytes, 1 << 20, int64_t{1} << 36)
          .Says("bytes", "The database's cache of blocks."),
      Days("retention.raw_days", &p.retention.raw_seconds)
          .Says("days", "How long every value is kept bit for bit; 0 means for ever."),
      Days("retention.rounded_days", &p.retention.rounded_seconds)
          .Says("days", "How long values with mantissas of 12 bits are kept; 0 means for ever."),
      Days("retention.summary_days", &p.retention.summarized_seconds)
          .Says("days", "How long minimum, mean and maximum of 256 steps are kept; 0 means for ever."),
  };
  fields.push_back(Field{"export.per_head",
                         [o](StrictYaml* yaml, const YAML::Node& node) {
                           constexpr std::array kWords = {"topk", "all", "none"};
                           size_t which = 0;
                           if (!yaml->Choice(node, "export.per_head", kWords, &which)) return;
                           o->exporter.heads.all = which == 1;
                           if (which == 2) o->exporter.heads.heads_top = 0;
                         },
                         [o] {
                           return o->exporter.heads.all ? "all" : o->exporter.heads.heads_top == 0 ? "none" : "topk";
                         },
                         "topk, all or none"}
                       .Says("", "Which heads have series of their own on `/metrics`."));
  std::vector<Field> rest = {
      Number<int32_t>("export.heads_max", &o->exporter.heads.heads_top, 0, 1024)
          .Says("heads", "How many of the worst heads of a run `export.per_head: topk` takes."),
      Number<int32_t>("export.rows_max", &o->exporter.rows.rows_top, 0, 1024)
          .Says("rows",
                "How many of the worst tensors, modules and ranks of a run have series of their own, for each signal."),
      file("cluster.dsn_file", &o->cluster.dsn_file)
          .Says("",
                "File with libpq's connection string of the [cluster's](../operate/cluster.md) one database, which no "
                "other user may read.",
                "none: this server is alone"),
  };
  std::move(rest.begin(), rest.end(), std::back_inserter(fields));
  Field dsn_files =
      Texts("cluster.dsn_files", &o->cluster.dsn_files, 1, kDatabasesMax, CheckOnce)
          .Says("", "Instead of `cluster.dsn_file`: such files of several databases, in an order that stays.");
  dsn_files.read = [o, folder, texts = dsn_files.read](StrictYaml* yaml, const YAML::Node& node) {
    texts(yaml, node);
    for (std::string& name : o->cluster.dsn_files) name = (folder / name).string();
  };
  fields.push_back(std::move(dsn_files));
  rest = {
      Text("cluster.node", &o->cluster.node).Says("", "This server's name, unique in the cluster.", "the host's name"),
      Address("cluster.address", &o->cluster.address, CheckPeerAddress, "host:port or unix:/path")
          .Says("", "Where clients and the other servers reach this one.", "`grpc.listen_address`"),
      file("cluster.peer_cert_file", &o->cluster.peer.certificate)
          .Says("", "PEM: the certificate that this server shows to the others.", "`tls.cert_file`")
          .Contents(kSeen),
      file("cluster.peer_key_file", &o->cluster.peer.key)
          .Says("", "PEM: that certificate's key.", "`tls.key_file`")
          .Contents(kSeen),
      file("cluster.peer_ca_file", &o->cluster.peer.client_ca)
          .Says("", "PEM: the authorities that signed the other servers' certificates.", "`tls.client_ca_file`")
          .Contents(kSeen),
      Number<int64_t>("cluster.lease_seconds", &o->cluster.lease_seconds, 2, 60)
          .Says("seconds", "How long a dead server's runs wait until another server takes them."),
      Number<int>("cluster.connections", &o->cluster.connections, 1, 64)
          .Says("connections", "Connections to each database that commit frames; up to ten more do the rest."),
  };
  std::move(rest.begin(), rest.end(), std::back_inserter(fields));
  return fields;
}

// What may have been meant by `name` below `prefix` ("" or "grpc."), as ": did you mean ...?", or "".
std::string Suggestion(const std::string& prefix, const std::string& name, const std::vector<Field>& fields) {
  std::vector<std::string> here;       // What stands at that place: keys and the names of maps.
  std::vector<std::string> elsewhere;  // Keys of that very name in other maps.
  for (const Field& field : fields) {
    if (field.key.starts_with(prefix))
      here.push_back(field.key.substr(prefix.size(), field.key.find('.', prefix.size()) - prefix.size()));
    if (field.key.ends_with(absl::StrCat(".", name))) elsewhere.push_back(field.key);
  }
  if (elsewhere.size() == 1) return absl::StrCat(": did you mean ", elsewhere.front(), "?");
  return DidYouMean(name, here, prefix);
}

// Visits every leaf: a known key, or a map on the way to one.  Returns how many leaves were known.
size_t ReadKeys(StrictYaml* yaml, const YAML::Node& node, const std::string& path, const std::vector<Field>& fields) {
  size_t known = 0;
  const std::string prefix = path.empty() ? "" : path + ".";
  yaml->ForEach(node, path, [&](const std::string& name, const YAML::Node& at, const YAML::Node& value) {
    const std::string key = prefix + name;
    const auto exact = std::find_if(fields.begin(), fields.end(), [&](const Field& field) { return field.key == key; });
    if (exact != fields.end()) {
      ++known;
      exact->read(yaml, value);
    } else if (std::any_of(fields.begin(), fields.end(),
                           [&](const Field& field) { return field.key.rfind(key + ".", 0) == 0; })) {
      known += ReadKeys(yaml, value, key, fields);
    } else {
      yaml->Report(at, absl::StrCat("unknown key ", CleanText(key, kTextBytesMax), Suggestion(prefix, name, fields)));
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

absl::Status CheckPageUrl(std::string_view key, std::string_view url) {
  if (url.empty() || url.starts_with("https://") || url.starts_with("http://")) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(key), " = ", CleanText(url, 200), ": must begin with https:// or http://"));
}

absl::Status CheckProtection(const ServerOptions& options) {
  if (options.insecure_i_understand) return absl::OkStatus();
  if (!IsLoopback(options.grpc_address) && (!options.tls.on() || options.tls.client_ca.empty())) {
    return absl::FailedPreconditionError(absl::StrCat(
        "grpc.listen_address = ", options.grpc_address,
        ": off loopback clients must show certificates, else anybody writes into your runs: set tls.cert_file, "
        "tls.key_file and tls.client_ca_file (`bellwether cert` makes them), or use a loopback address behind a proxy, "
        "or --insecure-i-understand"));
  }
  if (options.web_address.empty() || IsLoopback(options.web_address)) return absl::OkStatus();
  const bool guarded = !options.access.access_file.empty() || !options.web_token.empty();
  if (options.tls.on() && options.web_tls && guarded) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("web.listen_address = ", options.web_address,
                                                    ": off loopback the page must speak TLS and ask who reads it: set "
                                                    "tls.cert_file and tls.key_file, and access_file or "
                                                    "--web.token-file; or use a loopback address behind a proxy, or "
                                                    "--insecure-i-understand"));
}

absl::StatusOr<size_t> ReadConfig(const std::string& path, ServerOptions* options, ServerOptions* legible) {
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
  changed.engine.answers_bytes_max = changed.query_engine.memory.WholeMax();
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
  if (!findings.empty()) {
    if (legible != nullptr) *legible = std::move(changed);
    return absl::InvalidArgumentError(absl::StrJoin(findings, "\n"));
  }
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

namespace {

const char* ChangeText(ConfigChange change) {
  switch (change) {
    case ConfigChange::kReload:
      return "restart; what the file says: reload";
    case ConfigChange::kReloadOrSeen:
      return "restart; what the file says: reload, or by itself";
    case ConfigChange::kSeen:
      return "restart; what the file says: by itself";
    case ConfigChange::kRestart:
      break;
  }
  return "restart";
}

template <typename Options>
void AppendReceiverKeys(std::string_view list, const std::vector<ReceiverKey<Options>>& keys, std::string* page) {
  absl::StrAppend(page, "\n## `", absl::string_view(list.data(), list.size()),
                  "`: the keys of one\n\n| key | default | range | unit | meaning | a change needs |\n"
                  "| --- | --- | --- | --- | --- | --- |\n");
  for (const ReceiverKey<Options>& key : keys) {
    if (key.meaning.empty()) continue;
    absl::StrAppend(page, "| `", key.name, "` | ", key.built_in, " | ", key.legal, " | ", key.unit, " | ", key.meaning,
                    " | restart |\n");
  }
}

}  // namespace

std::string ConfigReference() {
  std::string page = absl::StrCat(
      "# The configuration file\n\nGenerated by `bellwetherd config reference`; do not edit.\n\n"
      "bellwetherd reads one YAML file of at most ",
      kConfigBytesMax / 1024,
      " KiB at its start (`--config.file`); [flags](cli.md#bellwetherd) win over it. A dot in a key's name stands for "
      "a "
      "map: `limits: {runs_live_max: 500}` is `limits.runs_live_max`. A relative name of a file means one beside the "
      "configuration. What is wrong is refused with file, line and column, all of it at once; an unknown key comes "
      "with "
      "the one that was probably meant. Check a file with `bellwetherd --config.file=bellwetherd.yml "
      "--config.check`: it reads the files that the keys name as well, and has each finding with its key.\n\n"
      "Every key itself counts from the next start on (`systemctl restart bellwetherd`). A file that a key names may "
      "be "
      "read again earlier, as the last column says: at a *reload* (`systemctl reload bellwetherd`, SIGHUP, or `POST "
      "/-/reload` where `web.enable_reload` is on), or *by itself* when it changes.\n\n"
      "| key | default | range | unit | meaning | a change needs |\n| --- | --- | --- | --- | --- | --- |\n");
  ServerOptions defaults;
  for (const Field& field : Fields(&defaults)) {
    const std::string value = field.show();
    const std::string built_in = field.built_in.empty() ? value.empty() ? "none" : value : field.built_in;
    absl::StrAppend(&page, "| `", field.key, "` | ", built_in, " | ", field.legal, " | ", field.unit, " | ",
                    field.meaning, " | ", ChangeText(field.change), " |\n");
  }
  AppendReceiverKeys("alerting.webhooks", WebhookKeys({}), &page);
  AppendReceiverKeys("alerting.alertmanagers", AlertmanagerKeys(), &page);
  return page;
}

}  // namespace bellwether::server
