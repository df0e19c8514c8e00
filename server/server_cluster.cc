// The part of the Server that makes it one of a cluster: the shared log, the leases,
// and what the other servers are asked with.

#include <grpcpp/grpcpp.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <memory>
#include <string>
#include <utility>

#include "server/cluster/postgres_log.h"
#include "server/server.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

void Server::ShareLog() {
  owner_name_ = NewOwnerName(options_.cluster.node);
  PostgresLogOptions log;
  log.dsn = options_.cluster.dsn;
  log.owner = owner_name_;
  log.writers = options_.cluster.connections;
  options_.pipeline.open_shared_log = [log](LogBackend::DurableCallback on_durable) {
    return OpenPostgresLog(log, std::move(on_durable));
  };
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> Server::PeerCredentials() {
  const ClusterOptions& cluster = options_.cluster;
  if (tls_ == nullptr) return grpc::InsecureChannelCredentials();
  TlsFiles files = options_.tls;
  if (!cluster.peer.certificate.empty()) {
    files.certificate = cluster.peer.certificate;
    files.key = cluster.peer.key;
  }
  if (!cluster.peer.client_ca.empty()) files.client_ca = cluster.peer.client_ca;
  const TlsWatch* shown = tls_.get();
  if (!cluster.peer.certificate.empty() || !cluster.peer.client_ca.empty()) {
    BW_ASSIGN_OR_RETURN(peer_tls_, TlsWatch::Open(files, &counters_, clock_));
    shown = peer_tls_.get();
  }
  namespace e = grpc::experimental;
  e::TlsChannelCredentialsOptions tls;
  tls.set_certificate_provider(std::make_shared<e::FileWatcherCertificateProvider>(
      shown->identity_path(), shown->identity_path(), shown->client_ca_path(), options_.tls_refresh_seconds));
  tls.watch_identity_key_cert_pairs();
  if (!files.client_ca.empty()) tls.watch_root_certs();  // Else those of the system.
  return e::TlsCredentials(tls);
}

absl::Status Server::StartPeers() {
  PeerChannels::Options peers;
  BW_ASSIGN_OR_RETURN(peers.credentials, PeerCredentials());
  peers.seal_as_server = [this](const std::string& method) { return access_->PassOnAsServer(method); };
  peers.call_ms_max = options_.query_engine.deadline_ms;
  peers_ = std::make_unique<PeerChannels>(std::move(peers), &asked_member_, &counters_, clock_);
  elsewhere_ = std::make_unique<Elsewhere>(peers_.get(), pipeline_->runs(), clock_);
  return absl::OkStatus();
}

absl::Status Server::JoinCluster() {
  ClusterOptions cluster = options_.cluster;
  if (cluster.address.empty()) cluster.address = grpc_address_;
  BW_ASSIGN_OR_RETURN(member_, Member::Start(cluster, owner_name_, pipeline_.get(), &counters_, clock_));
  access_->SetPeers(member_->peer_key(), [member = member_.get()] { return member->DatabaseUnixMillis(); });
  asked_member_ = member_.get();
  return absl::OkStatus();
}

}  // namespace bellwether::server
