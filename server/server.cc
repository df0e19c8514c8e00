#include "server/server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/config.h"
#include "server/proposals.h"
#include "server/query/json_api.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"
#include "server/version.h"

namespace bellwether::server {
namespace {

bool IsLoopback(const std::string& address) {
  return absl::StartsWith(address, "unix:") || absl::StartsWith(address, "127.") ||
         absl::StartsWith(address, "localhost:") || absl::StartsWith(address, "[::1]:");
}

absl::Status CheckLoopback(const std::string& what, const std::string& address, bool allowed) {
  if (allowed || IsLoopback(address)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(what, " = ", address, ": plaintext off loopback lets anybody write into your runs; use a loopback "
                                         "address behind a TLS proxy, or --insecure-i-understand"));
}

absl::StatusOr<std::pair<std::string, int>> SplitHostPort(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon == std::string::npos || !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("web.listen_address = ", address, ": must be host:port"));
  }
  return std::make_pair(address.substr(0, colon), port);
}

// RELIABILITY: how a stream's memory stays bounded and a dead peer is found.
void SetChannelArguments(grpc::ServerBuilder* builder, uint32_t message_bytes_max) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(message_bytes_max));
  builder->AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 64 << 10);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 8'000);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 64);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 8 << 10);
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 5'000);
}

}  // namespace

Server::Server(ServerOptions options) : options_(std::move(options)), clock_(Clock::System()) {}

Server::~Server() { (void)Stop(); }

absl::StatusOr<std::unique_ptr<Server>> Server::Start(ServerOptions options) {
  std::unique_ptr<Server> server(new Server(std::move(options)));
  BW_RETURN_IF_ERROR(server->StartAll());
  return server;
}

absl::Status Server::StartAll() {
  BW_RETURN_IF_ERROR(CheckLoopback("grpc.listen-address", options_.grpc_address, options_.insecure_i_understand));
  if (!options_.web_address.empty()) {
    BW_RETURN_IF_ERROR(CheckLoopback("web.listen-address", options_.web_address, options_.insecure_i_understand));
  }
  RunControl::Info& info = options_.pipeline.info;
  info.version = kVersion;
  info.revision = kRevision;
  info.grpc_version = grpc::Version();
  info.storage_path = options_.pipeline.storage_path;
  info.started_unix_ns = clock_->UnixNanos();
  info.options = DescribeOptions(options_);
  info.limits = DescribeLimits(options_);
  BW_RETURN_IF_ERROR(StartBank());
  NoteReload();
  BW_ASSIGN_OR_RETURN(pipeline_, Pipeline::Open(options_.pipeline, &counters_, clock_));
  engine_ = std::make_unique<QueryEngine>(
      options_.query_engine,
      QueryStores{pipeline_->runs(), pipeline_->series(), pipeline_->alerts(), pipeline_->database(),
                  pipeline_->baselines(), pipeline_.get(), clock_, &counters_, pipeline_->actions()});
  query_ = std::make_unique<QueryService>(options_.query, engine_.get());
  exporter_ = std::make_unique<Exporter>(options_.exporter, pipeline_->runs(), pipeline_->alerts(), &counters_, clock_);
  BW_RETURN_IF_ERROR(StartHttp());
  const std::string& page = options_.external_url.empty() ? page_url_ : options_.external_url;
  for (WebhookOptions webhook : options_.webhooks) {
    webhook.external_url = page;
    webhook.proposals = ProposalText;
    BW_ASSIGN_OR_RETURN(auto started,
                        Webhook::Start(webhook, pipeline_->alerts(), pipeline_->actions(), &counters_));
    webhooks_.push_back(std::move(started));
  }
  for (AlertmanagerOptions alertmanager : options_.alertmanagers) {
    alertmanager.external_url = page;
    alertmanager.holds = options_.exporter.holds;
    alertmanager.proposals = [actions = pipeline_->actions()](const Transition& alert) {
      const auto of_run = actions->List(alert.run);
      return of_run.ok() ? ProposalText(*of_run, alert) : std::string();
    };
    BW_ASSIGN_OR_RETURN(auto started,
                        Alertmanager::Start(alertmanager, pipeline_->alerts(), pipeline_->runs(), &counters_));
    alertmanagers_.push_back(std::move(started));
  }
  BW_RETURN_IF_ERROR(StartGrpc());
  BW_ASSIGN_OR_RETURN(checkpoints_,
                      CheckpointSocket::Start(options_.pipeline.storage_path, [this](const std::string& directory) {
                        return pipeline_->WriteCheckpoint(directory);
                      }));
  pipeline_->SetAddresses(grpc_address_, http_address_);
  busy_ns_ = clock_->MonotonicNanos();
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
  options_.pipeline.bank = bank_.get();
  gpu_spectra_ = OpenGpuSpectra(options_.bank, [degraded](const std::string& why) {
    degraded->Set(1);
    LogError("the GPU is given up, spectra go on on the CPU: {}", why);
  });
  options_.pipeline.spectra_bank = gpu_spectra_.get();
  options_.pipeline.info.backend = bank_->backend();
  counters_.gauge("bellwether_build_info",
                  {{"version", kVersion}, {"revision", kRevision}, {"cuda", gpu_bank_ != nullptr ? "on" : "off"}})
      ->Set(1);
  return absl::OkStatus();
}

absl::Status Server::StartHttp() {
  if (options_.web_address.empty()) return absl::OkStatus();
  BW_ASSIGN_OR_RETURN(const auto address, SplitHostPort(options_.web_address));
  HttpOptions http = options_.http;
  http.host = address.first;
  http.port = address.second;
  http.token = options_.web_token;
  HttpSources sources;
  sources.metrics = [this] { return exporter_->Render(); };
  sources.ready = [this] { return pipeline_->Ready(); };
  sources.call = [this](const std::string& method, const std::string& body) { return CallJson(*engine_, method, body); };
  if (options_.reload_by_http) sources.reload = [this] { return Reload(); };
  sources.transition_json = TransitionToJson;
  sources.runs = pipeline_->runs();
  sources.alerts = pipeline_->alerts();
  sources.counters = &counters_;
  BW_ASSIGN_OR_RETURN(http_, HttpServer::Start(http, std::move(sources)));
  http_address_ = absl::StrCat(http.host, ":", http_->port());
  page_url_ = absl::StrCat("http://", http_address_, "/");
  if (!http.token.empty()) absl::StrAppend(&page_url_, "?token=", http.token);
  return absl::OkStatus();
}

absl::Status Server::StartGrpc() {
  IngestService::Options ingest = options_.ingest;
  ingest.limits = options_.pipeline.limits;
  ingest.server_version = kVersion;
  if (!page_url_.empty()) ingest.page_url_prefix = page_url_ + "#/run/";
  ingest_ = std::make_unique<IngestService>(ingest, pipeline_.get(), &counters_, clock_);
  grpc::EnableDefaultHealthCheckService(true);
  // Reflection on loopback only: it tells strangers too much.
  static const bool reflection = [] {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)reflection;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(options_.grpc_address, grpc::InsecureServerCredentials(), &port);
  SetChannelArguments(&builder, ingest.message_bytes_max);
  builder.RegisterService(ingest_.get());
  builder.RegisterService(query_.get());
  grpc_ = builder.BuildAndStart();
  const bool is_unix = absl::StartsWith(options_.grpc_address, "unix:");
  if (grpc_ == nullptr || (!is_unix && port == 0)) {
    return absl::UnavailableError(absl::StrCat("grpc.listen-address = ", options_.grpc_address, ": cannot be bound"));
  }
  grpc_address_ = is_unix ? options_.grpc_address
                          : absl::StrCat(options_.grpc_address.substr(0, options_.grpc_address.rfind(':')), ":", port);
  return absl::OkStatus();
}

absl::Status Server::Reload() {
  absl::MutexLock lock(&reload_mutex_);
  if (options_.rules_file.empty() && options_.policy_file.empty()) {
    LogWarning(
        "nothing to read again: there is no rules file and no policy file, and the configuration is read at start only");
  }
  const auto refuse = [this](const char* what, const absl::Status& status) {
    counters_.gauge("bellwether_config_last_reload_successful")->Set(0);
    LogError("{} as they were: {}", what, std::string(status.message()));
    return status;
  };
  // Both or neither.
  RuleSetPtr rules;
  PolicyPtr policy;
  if (!options_.rules_file.empty()) {
    const auto read = ReadRules(options_.rules_file);
    if (!read.ok()) return refuse("the rules stay", read.status());
    rules = *read;
  }
  if (!options_.policy_file.empty()) {
    const auto read = ReadPolicy(options_.policy_file);
    if (!read.ok()) return refuse("rules and policy stay", read.status());
    policy = *read;
  }
  NoteReload();
  if (rules != nullptr) {
    pipeline_->SetRules(rules);
    LogInfo("rules read again from {}", options_.rules_file);
  }
  if (policy != nullptr) {
    pipeline_->SetPolicy(policy);
    LogInfo("the policy was read again from {}", options_.policy_file);
  }
  return absl::OkStatus();
}

void Server::NoteReload() {
  counters_.gauge("bellwether_config_last_reload_successful")->Set(1);
  counters_.gauge("bellwether_config_last_reload_success_timestamp_seconds")
      ->Set(static_cast<double>(clock_->UnixMillis()) * 1e-3);
}

absl::StatusOr<bool> Server::Tick() {
  BW_RETURN_IF_ERROR(pipeline_->Maintain());
  if (const bool ready = pipeline_->Ready().ok(); ready != ready_) {
    ready_ = ready;
    grpc_->GetHealthCheckService()->SetServingStatus(ready);
  }
  ingest_->CutIdle();
  const int64_t now_ns = clock_->MonotonicNanos();
  if (ingest_->streams_open() > 0 || query_->streams_open() > 0) busy_ns_ = now_ns;
  return options_.idle_exit_seconds == 0 || now_ns - busy_ns_ < options_.idle_exit_seconds * 1'000'000'000;
}

absl::Status Server::Stop() {
  if (stopped_) return absl::OkStatus();
  stopped_ = true;
  if (grpc_ != nullptr) {
    grpc_->GetHealthCheckService()->SetServingStatus(false);
    // What was taken becomes durable and is acknowledged before streams end.
    ingest_->Drain();
    query_->Shutdown();
    grpc_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(5));
    grpc_->Wait();
  }
  checkpoints_.reset();
  for (const auto& webhook : webhooks_) webhook->Stop();
  for (const auto& alertmanager : alertmanagers_) alertmanager->Stop();
  if (http_ != nullptr) http_->Stop();
  return pipeline_ != nullptr ? pipeline_->Close() : absl::OkStatus();
}

}  // namespace bellwether::server
