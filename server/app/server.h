// server.h: the whole service: owns every part, starts and stops them in order.

#ifndef BELLWETHER_SERVER_APP_SERVER_H_
#define BELLWETHER_SERVER_APP_SERVER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/access/access.h"
#include "server/access/tls_files.h"
#include "server/app/cluster_part.h"
#include "server/cluster/cluster_options.h"
#include "server/detect/bank_choice.h"
#include "server/detect/measured_bank.h"
#include "server/engine/engine.h"
#include "server/export/alertmanager.h"
#include "server/export/prometheus.h"
#include "server/export/webhook.h"
#include "server/http/http_server.h"
#include "server/ingest/ingest_service.h"
#include "server/net/checkpoint_socket.h"
#include "server/net/connection_acceptor.h"
#include "server/query/query_engine.h"
#include "server/query/query_service.h"
#include "server/query/run_router.h"
#include "server/query/server_info.h"

namespace grpc {
class Server;
class ServerCredentials;
}  // namespace grpc

namespace bellwether::server {

struct ServerOptions {
  std::string grpc_address = "127.0.0.1:7070";  // host:port or unix:/path
  std::string web_address = "127.0.0.1:7071";   // host:port; "" = none
  std::string web_token;                        // "" = none
  bool web_tls = true;                          // Where there is TLS at all.
  TlsFiles tls;
  unsigned tls_refresh_seconds = 10;  // How often gRPC looks at the files.
  AccessOptions access;               // page_token is web_token.
  ConnectionLimits connections;
  int connection_age_seconds = 7200;      // Of gRPC; 0 = any.
  int connection_age_grace_seconds = 30;  // Then, for calls under way.
  std::string external_url;               // Of the page, for links.
  std::string runbook_url;                // Of runbooks, for links; "" = those of the page.
  std::string rules_file;                 // engine.rules are its rules; "" = none
  std::string policy_file;                // engine.policy is its policy; "" = none
  bool reload_by_http = false;            // POST /-/reload.
  bool insecure_i_understand = false;     // Plaintext off loopback.
  int64_t idle_exit_seconds = 0;          // 0 = never
  Engine::Options engine;
  IngestService::Options ingest;
  QueryEngine::Options query_engine;
  QueryService::Options query;
  ExportOptions exporter;
  HttpOptions http;
  std::vector<WebhookOptions> webhooks;
  std::vector<AlertmanagerOptions> alertmanagers;
  BankOptions bank;
  ClusterOptions cluster;
};

class Server {
 public:
  // UNAVAILABLE: an address cannot be bound.  FAILED_PRECONDITION: an address
  // off loopback without protection; files that are not safe.
  // INVALID_ARGUMENT: a file is not legal.  DATA_LOSS: the storage is damaged.
  static absl::StatusOr<std::unique_ptr<Server>> Start(ServerOptions options);
  ~Server();  // As Stop().

  const std::string& grpc_address() const { return grpc_address_; }
  const std::string& page_url() const { return page_url_; }  // "" = none; holds the token, if there is one.
  const std::string& http_address() const { return http_address_; }

  // Housekeeping; call each second.  False: idle for idle_exit_seconds.  An error
  // is final: the server must not go on.
  absl::StatusOr<bool> Tick();
  // Reads the rules, the policy and the access files again, those that there are;
  // live runs go on by them with all that they have seen.  With none nothing is
  // read, which is no failure: what is in force is what there is.  Else nothing
  // changes: NOT_FOUND, INVALID_ARGUMENT: as ReadRules, ReadPolicy and ReadAccess.
  // Logged, and shown by bellwether_config_last_reload_*.  Thread-safe.
  absl::Status Reload();
  // Sends streams the request to come back, takes no more, makes everything
  // durable.
  absl::Status Stop();

 private:
  explicit Server(ServerOptions options);
  absl::Status StartAll();
  absl::Status StartAccess();
  absl::Status StartBank();
  absl::Status StartGrpc();
  std::shared_ptr<grpc::ServerCredentials> GrpcCredentials() const;
  absl::Status StartCluster();
  // On a thread of its own until Stop(): what Tick() must not hold up, nor be held up by.
  void EachSecond(const std::function<void()>& task);
  absl::Status StartHttp();
  std::string PageForOthers() const;
  std::string PageForTrainers() const;
  // What GetServerInfo is answered.
  ServerInfo Info();
  void RecordInfo();
  void RecordReload() ABSL_EXCLUSIVE_LOCKS_REQUIRED(reload_mutex_);

  ServerOptions options_;
  std::string grpc_address_, http_address_, page_url_;
  absl::Mutex info_mutex_;
  ServerInfo info_ ABSL_GUARDED_BY(info_mutex_);  // Without what changes: Info().
  absl::Mutex reload_mutex_;
  // Whether what was read last was good: rules and policy, and identities.
  bool rules_good_ ABSL_GUARDED_BY(reload_mutex_) = true;
  bool identities_good_ ABSL_GUARDED_BY(reload_mutex_) = true;
  Counters counters_;
  Clock* const clock_;
  std::unique_ptr<TlsWatch> tls_;  // Null: plaintext.
  std::unique_ptr<Access> access_;
  std::unique_ptr<GpuBank> gpu_bank_;  // Null: detectors run on the CPU.
  std::unique_ptr<MeasuredBank> bank_;
  std::unique_ptr<SpectraBank> gpu_spectra_;  // Null: spectra run on the CPU.
  std::unique_ptr<ClusterPart> cluster_;      // Null: this server is alone.
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Exporter> exporter_;
  std::vector<std::unique_ptr<Webhook>> webhooks_;
  std::vector<std::unique_ptr<Alertmanager>> alertmanagers_;
  std::unique_ptr<RunRouter> router_;  // Null: this server is alone.
  std::unique_ptr<QueryEngine> queries_;
  std::unique_ptr<QueryService> query_;
  std::unique_ptr<IngestService> ingest_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<ConnectionAcceptor> listener_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::unique_ptr<grpc::Server> grpc_;
  std::unique_ptr<CheckpointSocket> checkpoints_;
  std::mutex cut_idle_mutex_;
  std::condition_variable cut_idle_wake_;  // Its waits are by the monotonic clock; abseil's are not.
  bool cut_idle_stop_ = false;
  std::thread cut_idle_thread_, upkeep_;
  int64_t busy_ns_ = 0;  // When a client was last attached.
  bool ready_ = true;    // The health service's last state.
  bool stopped_ = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_APP_SERVER_H_
