#include "server/app/server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <pwd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/access/client_check.h"
#include "server/act/proposals.h"
#include "server/app/config.h"
#include "server/app/version.h"
#include "server/net/grpc_log.h"
#include "server/query/json_api.h"
#include "server/store/file_system.h"
#include "server/store/run_table.h"
#include "server/util/clean_text.h"
#include "server/util/host_port.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// As ADDRESS:PORT.
bool ListensOnAll(const std::string& address) {
  return absl::StartsWith(address, "0.0.0.0:") || absl::StartsWith(address, "[::]:") ||
         absl::StartsWith(address, ":::");
}

// RELIABILITY: how a stream's memory stays bounded and a dead peer is found.
void SetChannelArguments(grpc::ServerBuilder* builder, const ServerOptions& options, uint32_t message_bytes_max) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(message_bytes_max));
  builder->AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 64 << 10);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 8'000);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 64);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 8 << 10);
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 5'000);
  if (options.connection_age_seconds == 0) return;
  // So that clients spread again over servers behind one name, follow an address that
  // changed, and show certificates that still count.  gRPC moves the age by up to a
  // tenth either way, so that what came at once does not come back at once, and says
  // GOAWAY; after the grace it closes.  We end no stream before that: gRPC does not tell
  // us of the age, a clock of our own beside its would be a second one, and nothing would
  // be gained.  To a client it is a connection that breaks, which it bears anyway: a
  // sender is back within 0.25 s and sends again what was not acknowledged, and who
  // watches goes on behind what he has.
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, options.connection_age_seconds * 1'000);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, options.connection_age_grace_seconds * 1'000);
}

// What a start needs that the machine has refused at the storage folder, for an operator to give.
absl::Status WithRemedy(const absl::Status& status, const ServerOptions& options) {
  const std::string& path = options.engine.storage_path;
  const std::string said(status.message());
  std::string remedy;
  if (status.ok() || !(absl::StrContains(said, path) || absl::StrContains(said, "make directory"))) return status;
  if (absl::StrContains(said, std::strerror(EACCES)) || absl::StrContains(said, std::strerror(EROFS))) {
    const passwd* const user = getpwuid(geteuid());
    const std::string name = user != nullptr ? user->pw_name : absl::StrCat(geteuid());
    remedy = absl::StrCat("user ", name, " must be able to write ", path, ": sudo install -d -o ", name, " -m 700 ",
                          path, ", or sudo chown -R ", name, " ", path, "; or name another folder with --storage.path");
  } else if (absl::StrContains(said, std::strerror(ENOSPC)) || absl::StrContains(said, std::strerror(EDQUOT))) {
    std::error_code unknown;
    const std::filesystem::space_info space = std::filesystem::space(path, unknown);
    remedy = absl::StrCat("the log lays out two segments of ", options.engine.wal.segment_bytes >> 20,
                          " MiB ahead (storage.wal_segment_bytes), and ", unknown ? 0 : space.available >> 20,
                          " MiB are free there: make room, or name another folder with --storage.path");
  }
  return remedy.empty() ? status : absl::Status(status.code(), absl::StrCat(said, "; ", remedy));
}

class LeaveOutReflection final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    std::erase_if(*plugins, [](const auto& plugin) { return plugin->name() == "proto_server_reflection"; });
  }
};

}  // namespace

Server::Server(ServerOptions options) : options_(std::move(options)), clock_(Clock::System()) {}

Server::~Server() { (void)Stop(); }

absl::StatusOr<std::unique_ptr<Server>> Server::Start(ServerOptions options) {
  std::unique_ptr<Server> server(new Server(std::move(options)));
  BW_RETURN_IF_ERROR(WithRemedy(server->StartAll(), server->options_));
  return server;
}

absl::Status Server::StartAll() {
  TakeGrpcLog();
  BW_RETURN_IF_ERROR(CheckProtection(options_));
  BW_RETURN_IF_ERROR(StartAccess());
  BW_RETURN_IF_ERROR(StartBank());
  RecordInfo();
  {
    absl::MutexLock lock(&reload_mutex_);
    RecordReload();
  }
  if (options_.cluster.on()) BW_RETURN_IF_ERROR(StartCluster());
  options_.engine.answers_bytes_max = options_.query_engine.memory.WholeMax();
  BW_ASSIGN_OR_RETURN(engine_, Engine::Open(options_.engine, &counters_, clock_));
  if (cluster_ != nullptr) {
    BW_ASSIGN_OR_RETURN(Peers* const peers, cluster_->StartPeers());
    router_ = std::make_unique<RunRouter>(peers, engine_->runs(), clock_);
  }
  queries_ = std::make_unique<QueryEngine>(
      options_.query_engine, QueryStores{engine_->runs(), engine_->series(), engine_->alerts(), engine_->database(),
                                         engine_->baselines(), engine_->control(), clock_, &counters_,
                                         engine_->actions(), router_.get(), [this] { return Info(); }});
  QueryService::Options query = options_.query;
  query.access = access_.get();
  query_ = std::make_unique<QueryService>(query, queries_.get());
  exporter_ = std::make_unique<Exporter>(options_.exporter, engine_->runs(), engine_->alerts(), &counters_, clock_);
  BW_RETURN_IF_ERROR(StartHttp());
  const std::string page = options_.external_url.empty() ? PageForOthers() : options_.external_url;
  const AlertLinks links = {.page = page,
                            .runbooks = options_.runbook_url.empty() ? RunbooksOfPage(page) : options_.runbook_url};
  if (http_ != nullptr && options_.tls.on() && options_.web_tls && absl::StartsWith(options_.external_url, "http://")) {
    LogWarning(
        "web.external_url = {}: the page speaks TLS, and trainers ask this address for alerts: it should begin with "
        "https://",
        options_.external_url);
  }
  const bool notifies = !options_.webhooks.empty() || !options_.alertmanagers.empty();
  if (notifies && options_.external_url.empty() && ListensOnAll(http_address_)) {
    LogWarning("web.listen_address is {} and web.external_url is not set: links in notifications will not open",
               http_address_);
  }
  for (WebhookOptions webhook : options_.webhooks) {
    webhook.links = links;
    webhook.advice = AdviceNow;
    webhook.notifies = [runs = engine_->runs()](RunId id) {
      const RunSnapshotPtr run = runs->Get(id);
      return run == nullptr || run->record.notifies();
    };
    webhook.imported = [runs = engine_->runs()](RunId id) {
      const RunSnapshotPtr run = runs->Get(id);
      return run != nullptr && !run->record.import_of.empty();
    };
    BW_ASSIGN_OR_RETURN(auto started, Webhook::Start(webhook, engine_->alerts(), engine_->actions(), &counters_));
    webhooks_.push_back(std::move(started));
  }
  const auto catch_up = [this](RunId first, RunId end) {
    for (const auto& webhook : webhooks_) webhook->CatchUp(first, end);
  };
  if (cluster_ != nullptr) {
    engine_->partitions()->SetAcquired(catch_up);
  } else {
    catch_up(0, std::numeric_limits<RunId>::max());
  }
  for (AlertmanagerOptions alertmanager : options_.alertmanagers) {
    alertmanager.links = links;
    alertmanager.holds = options_.exporter.holds;
    alertmanager.advice = [actions = engine_->actions()](const AlertTransition& alert) {
      const auto of_run = actions->List(alert.run);
      return of_run.ok() ? AdviceNow(*of_run, alert) : alert.advice;
    };
    BW_ASSIGN_OR_RETURN(auto started,
                        Alertmanager::Start(alertmanager, engine_->alerts(), engine_->runs(), &counters_));
    alertmanagers_.push_back(std::move(started));
  }
  BW_RETURN_IF_ERROR(StartGrpc());
  BW_ASSIGN_OR_RETURN(checkpoints_,
                      CheckpointSocket::Start(options_.engine.storage_path, [this](const std::string& directory) {
                        return engine_->WriteCheckpoint(directory);
                      }));
  {
    absl::MutexLock lock(&info_mutex_);
    info_.grpc_address = grpc_address_;
    info_.http_address = http_address_;
  }
  busy_ns_ = clock_->MonotonicNanos();
  return cluster_ != nullptr ? cluster_->Join(grpc_address_, engine_.get()) : absl::OkStatus();
}

absl::Status Server::StartCluster() {
  ClusterPart::Options options;
  options.cluster = options_.cluster;
  options.tls = options_.tls;
  options.tls_refresh_seconds = options_.tls_refresh_seconds;
  options.call_ms_max = options_.query_engine.deadline_ms;
  BW_ASSIGN_OR_RETURN(cluster_, ClusterPart::Make(std::move(options), tls_.get(), access_.get(), &counters_, clock_));
  cluster_->ShareLog(&options_.engine);
  return absl::OkStatus();
}

absl::Status Server::StartAccess() {
  if (options_.tls.on()) {
    BW_ASSIGN_OR_RETURN(tls_, TlsWatch::Open(options_.tls, &counters_, clock_));
  }
  AccessOptions access = options_.access;
  access.page_token = options_.web_token;
  if (access.audit.path.empty()) access.audit.path = absl::StrCat(options_.engine.storage_path, "/audit.log");
  BW_RETURN_IF_ERROR(FileSystem::Real()->MakeDirectory(options_.engine.storage_path));
  BW_ASSIGN_OR_RETURN(access_, Access::Open(access, &counters_, clock_, tls_.get()));
  if (!access.page_token.empty() || tls_ != nullptr || !access.tokens_file.empty()) {
    // Nobody else's debugger, no core file, reads what is in this memory.
    prctl(PR_SET_DUMPABLE, 0);
    const rlimit none{};
    setrlimit(RLIMIT_CORE, &none);
  }
  const int64_t descriptors = RaiseDescriptorLimit();
  // The store needs its own: a log that cannot be opened is worse than a connection that waits.
  const int64_t fit = std::max<int64_t>(descriptors / 4, 4);
  if (options_.connections.all_max > fit) {
    LogWarning("limits.connections_max = {}: taken as {}, a quarter of the {} descriptors that this process may have",
               options_.connections.all_max, fit, descriptors);
    options_.connections.all_max = fit;
  }
  options_.http.queue_max = static_cast<int>(std::clamp<int64_t>(fit / 2, 1, options_.http.queue_max));
  options_.http.workers_max = static_cast<int>(std::clamp<int64_t>(fit / 2, 2, options_.http.workers_max));
  options_.http.events.streams_max =
      static_cast<int>(std::clamp<int64_t>(fit / 2, 1, options_.http.events.streams_max));
  if (access_->open() && !IsLoopback(options_.grpc_address)) {
    LogWarning("no access_file: whoever {} may read, write and change everything",
               options_.tls.client_ca.empty() ? "can connect" : "holds a certificate");
  }
  return absl::OkStatus();
}

absl::Status Server::StartBank() {
  Gauge* const degraded = counters_.gauge("bellwether_degraded", {{"reason", "gpu"}});
  BW_ASSIGN_OR_RETURN(gpu_bank_, OpenBank(options_.bank, [degraded](const std::string& why) {
                        degraded->Set(1);
                        LogError("the GPU is given up, detectors go on on the CPU: {}", why);
                      }));
  DetectorBank* const bank = gpu_bank_ != nullptr ? gpu_bank_.get() : CpuDetectorBank();
  bank_ = std::make_unique<MeasuredBank>(bank, &counters_, clock_);
  options_.engine.bank = bank_.get();
  gpu_spectra_ = OpenGpuSpectra(options_.bank, [degraded](const std::string& why) {
    degraded->Set(1);
    LogError("the GPU is given up, spectra go on on the CPU: {}", why);
  });
  options_.engine.spectra_bank = gpu_spectra_.get();
  counters_
      .gauge("bellwether_build_info",
             {{"version", kVersion}, {"revision", kRevision}, {"cuda", gpu_bank_ != nullptr ? "on" : "off"}})
      ->Set(1);
  return absl::OkStatus();
}

absl::Status Server::StartHttp() {
  if (options_.web_address.empty()) return absl::OkStatus();
  BW_ASSIGN_OR_RETURN(const HostPort address, SplitHostPort("web.listen_address", options_.web_address));
  HttpOptions http = options_.http;
  http.host = address.host;
  http.port = address.port;
  HttpSources sources;
  sources.metrics = [this] { return exporter_->Render(); };
  sources.ready = [this] { return engine_->control()->Ready(); };
  sources.call = [this](const std::string& method, const std::string& body, const GrantPtr& grant,
                        const std::function<bool()>& cancelled, std::shared_ptr<const void>* memory) {
    return CallJson(*queries_, method, body, grant, cancelled, memory);
  };
  sources.methods = JsonMethods();
  sources.access = access_.get();
  if (options_.web_tls) sources.tls = tls_.get();
  if (options_.reload_by_http) sources.reload = [this] { return Reload(); };
  sources.transition_json = [runs = engine_->runs()](const AlertTransition& transition) {
    const RunSnapshotPtr run = runs->Get(transition.run);
    return TransitionToJson(transition, run == nullptr ? "" : FormatUuid(run->record.description.uuid));
  };
  sources.runs = engine_->runs();
  if (router_ != nullptr) sources.others = [this] { return router_->others(); };
  sources.alerts = engine_->alerts();
  sources.counters = &counters_;
  const char* const scheme = sources.tls != nullptr ? "https://" : "http://";
  BW_ASSIGN_OR_RETURN(http_, HttpServer::Start(http, std::move(sources)));
  http_address_ = absl::StrCat(http.host, ":", http_->port());
  page_url_ = absl::StrCat(scheme, http_address_, "/");
  if (!options_.web_token.empty()) absl::StrAppend(&page_url_, "?token=", options_.web_token);
  return absl::OkStatus();
}

// The page's token opens everything: where people have identities of their own
// it is not handed to whoever may write a run or is notified.
std::string Server::PageForOthers() const {
  return access_->open() ? page_url_ : page_url_.substr(0, page_url_.find("?token="));
}

// As it is reached from elsewhere, if that is known: trainers ask it for alerts.
std::string Server::PageForTrainers() const {
  const std::string page = PageForOthers();
  if (options_.external_url.empty()) return page;
  const size_t token = page.find('?');
  return absl::StrCat(absl::StripSuffix(options_.external_url, "/"), "/",
                      token == std::string::npos ? "" : page.substr(token));
}

absl::Status Server::StartGrpc() {
  IngestService::Options ingest = options_.ingest;
  ingest.limits = options_.engine.limits;
  ingest.server_version = kVersion;
  if (!page_url_.empty()) ingest.page_url_prefix = PageForTrainers() + "#/run/";
  ingest.access = access_.get();
  ingest.runs = engine_->runs();
  ingest_ = std::make_unique<IngestService>(ingest, engine_->ingest(), &counters_, clock_);
  BW_ASSIGN_OR_RETURN(listener_, ConnectionAcceptor::Listen(options_.grpc_address, options_.connections, &counters_));
  grpc_address_ = listener_->address();
  grpc::EnableDefaultHealthCheckService(true);
  static const bool reflection = [] {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)reflection;
  grpc::ServerBuilder builder;
  // Reflection on loopback only, and where nobody is asked who he is: it tells strangers too much.
  if (!IsLoopback(options_.grpc_address) || !access_->open()) builder.SetOption(std::make_unique<LeaveOutReflection>());
  acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, GrpcCredentials());
  SetChannelArguments(&builder, options_, ingest.message_bytes_max);
  builder.RegisterService(ingest_.get());
  builder.RegisterService(query_.get());
  grpc_ = builder.BuildAndStart();
  if (grpc_ == nullptr) return absl::InternalError("gRPC does not start; its own words stand above");
  listener_->Start(acceptor_.get());
  cut_idle_thread_ = std::thread([this] { EachSecond([this] { ingest_->CutStreams(); }); });
  upkeep_ = std::thread([this] { EachSecond([this] { engine_->Upkeep(); }); });
  return absl::OkStatus();
}

void Server::EachSecond(const std::function<void()>& task) {
  std::unique_lock lock(cut_idle_mutex_);
  while (!cut_idle_wake_.wait_for(lock, std::chrono::seconds(1), [this] { return cut_idle_stop_; })) {
    lock.unlock();
    task();
    lock.lock();
  }
}

std::shared_ptr<grpc::ServerCredentials> Server::GrpcCredentials() const {
  // A Unix socket is guarded by its mode.
  if (tls_ == nullptr || absl::StartsWith(options_.grpc_address, "unix:")) return grpc::InsecureServerCredentials();
  namespace e = grpc::experimental;
  const bool ask = !options_.tls.client_ca.empty();
  const auto files = std::make_shared<e::FileWatcherCertificateProvider>(
      tls_->identity_path(), tls_->identity_path(), tls_->client_ca_path(), options_.tls_refresh_seconds);
  e::TlsServerCredentialsOptions tls(files);
  if (ask) tls.watch_root_certs();
  tls.watch_identity_key_cert_pairs();
  tls.set_cert_request_type(ask ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  if (!options_.tls.crl.empty()) {
    tls.set_certificate_verifier(ClientCheck(tls_.get()));
    tls.set_check_call_host(false);  // Of a server's certificate; this one is a client's.
  }
  return e::TlsServerCredentials(tls);
}

absl::Status Server::Reload() {
  absl::MutexLock lock(&reload_mutex_);
  if (options_.rules_file.empty() && options_.policy_file.empty() && access_->open()) {
    LogWarning(
        "nothing to read again: there is no rules, policy or access file, and the configuration is read at start only");
  }
  const auto refuse = [this](bool* good, const char* what, const absl::Status& status) {
    *good = false;
    counters_.gauge("bellwether_config_last_reload_successful")->Set(0);
    LogError("{} as they were: {}", what, std::string(status.message()));
    return status;
  };
  // Rules and policy both or neither; identities by themselves, so that taking
  // one's rights away waits for nothing.
  const absl::Status access = access_->Reload();
  if (!access.ok()) return refuse(&identities_good_, "identities stay", access);
  identities_good_ = true;
  RuleSetPtr rules;
  PolicyPtr policy;
  if (!options_.rules_file.empty()) {
    const auto read = ReadRules(options_.rules_file);
    if (!read.ok()) return refuse(&rules_good_, "the rules stay", read.status());
    rules = *read;
  }
  if (!options_.policy_file.empty()) {
    const auto read = ReadPolicy(options_.policy_file);
    if (!read.ok()) return refuse(&rules_good_, "rules and policy stay", read.status());
    policy = *read;
  }
  rules_good_ = true;
  RecordReload();
  if (rules != nullptr) {
    engine_->SetRules(rules);
    LogInfo("rules read again from {}", options_.rules_file);
  }
  if (policy != nullptr) {
    engine_->SetPolicy(policy);
    LogInfo("the policy was read again from {}", options_.policy_file);
  }
  return absl::OkStatus();
}

void Server::RecordInfo() {
  absl::MutexLock lock(&info_mutex_);
  info_.version = kVersion;
  info_.revision = kRevision;
  info_.grpc_version = grpc::Version();
  info_.backend = bank_->backend();
  info_.storage_path = CleanText(options_.engine.storage_path, 4096);  // Answers are UTF-8, paths need not be.
  info_.started_unix_ns = clock_->UnixNanos();
  info_.options = DescribeOptions(options_);
  info_.limits = DescribeLimits(options_);
}

ServerInfo Server::Info() {
  ServerInfo info;
  {
    absl::MutexLock lock(&info_mutex_);
    info = info_;
  }
  info.limits["memory_max"] = static_cast<double>(engine_->memory_max());  // The option may be 0: this machine's.
  for (const auto& entry : counters_.List()) {
    if (entry.histogram != nullptr) continue;
    std::string name = entry.name;
    for (const auto& [label, value] : entry.labels) absl::StrAppend(&name, "{", label, "=", value, "}");
    info.counters[name] = entry.counter != nullptr ? entry.counter->value() : entry.gauge->value();
  }
  return info;
}

void Server::RecordReload() {
  const bool good = rules_good_ && identities_good_;
  counters_.gauge("bellwether_config_last_reload_successful")->Set(good ? 1 : 0);
  if (!good) return;
  counters_.gauge("bellwether_config_last_reload_success_timestamp_seconds")
      ->Set(static_cast<double>(clock_->UnixMillis()) * 1e-3);
}

absl::StatusOr<bool> Server::Tick() {
  BW_RETURN_IF_ERROR(engine_->Maintain());
  if (const bool ready = engine_->control()->Ready().ok(); ready != ready_) {
    ready_ = ready;
    grpc_->GetHealthCheckService()->SetServingStatus(ready);
  }
  if (const std::optional<absl::Status> read = access_->Tick(); read.has_value()) {
    absl::MutexLock lock(&reload_mutex_);
    identities_good_ = read->ok();
    RecordReload();
  }
  if (tls_ != nullptr) tls_->Tick();
  if (cluster_ != nullptr) cluster_->Tick();
  const int64_t now_ns = clock_->MonotonicNanos();
  if (ingest_->streams_open() > 0 || query_->streams_open() > 0) busy_ns_ = now_ns;
  return options_.idle_exit_seconds == 0 || now_ns - busy_ns_ < options_.idle_exit_seconds * 1'000'000'000;
}

absl::Status Server::Stop() {
  if (stopped_) return absl::OkStatus();
  stopped_ = true;
  {
    const std::lock_guard lock(cut_idle_mutex_);
    cut_idle_stop_ = true;
  }
  cut_idle_wake_.notify_all();
  if (cut_idle_thread_.joinable()) cut_idle_thread_.join();
  if (listener_ != nullptr) listener_->Stop();
  if (cluster_ != nullptr) cluster_->Announce();
  if (grpc_ != nullptr) {
    grpc_->GetHealthCheckService()->SetServingStatus(false);
    // What was taken becomes durable and is acknowledged before streams end.
    ingest_->Drain();
    query_->Shutdown();
    grpc_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(5));
    grpc_->Wait();
  }
  checkpoints_.reset();
  if (cluster_ != nullptr) cluster_->Leave();  // Others go on before this one has put everything away.
  // All receivers have the same time, however many there are.
  for (const auto& webhook : webhooks_) webhook->AskToStop();
  for (const auto& alertmanager : alertmanagers_) alertmanager->AskToStop();
  for (const auto& webhook : webhooks_) webhook->Stop();
  for (const auto& alertmanager : alertmanagers_) alertmanager->Stop();
  if (http_ != nullptr) http_->Stop();
  if (upkeep_.joinable()) upkeep_.join();
  return engine_ != nullptr ? engine_->Close() : absl::OkStatus();
}

}  // namespace bellwether::server
