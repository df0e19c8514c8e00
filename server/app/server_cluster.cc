// The part of the Server that makes it one of a cluster: the shared log, the leases,
// and what the other servers are asked with.

#include <grpcpp/grpcpp.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bellwether/v1/query.pb.h"
#include "server/app/server.h"
#include "server/cluster/spread_log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// What the servers say that they serve; nothing of those that say nothing.
std::vector<Holding> HoldingsOf(const std::vector<std::string>& servers, Peers* peers) {
  constexpr char kMethod[] = "GetServerInfo";
  std::vector<Holding> holdings;
  for (const Peers::Answer& answer :
       peers->CallAll(servers, kMethod, v1::GetServerInfoRequest().SerializeAsString(), peers->SealAsServer(kMethod),
                      std::numeric_limits<int64_t>::max())) {
    v1::ServerInfo info;
    if (!answer.bytes.ok() || !info.ParseFromString(*answer.bytes)) continue;
    for (const v1::HeldPartition& held : info.partitions()) {
      holdings.push_back({held.number(), held.epoch(), answer.server});
    }
  }
  return holdings;
}

}  // namespace

void Server::ShareLog() {
  owner_name_ = NewOwnerName(options_.cluster.node);
  PostgresLogOptions log;
  log.owner = owner_name_;
  log.writers = options_.cluster.connections;
  options_.engine.open_shared_log = [log, dsns = options_.cluster.dsns](SharedLog::LaneDurableCallback on_durable) {
    return OpenSpreadLog(dsns, log, std::move(on_durable));
  };
  const auto owner_address = [this](uint32_t partition) {
    Members* const member = asked_member_;
    if (member == nullptr) return std::string();
    member->LookSoon(partition);
    return member->OwnerAddress(partition);
  };
  ownership_ = std::make_unique<PartitionOwnership>(static_cast<uint32_t>(options_.cluster.dsns.size()), owner_address);
  options_.engine.ownership = ownership_.get();
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> Server::PeerCredentials() {
  const ClusterOptions& cluster = options_.cluster;
  if (tls_ == nullptr) return grpc::InsecureChannelCredentials();
  TlsFiles files = options_.tls;
  files.crl.clear();  // Of those who come in; the others are servers.
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
  peers.databases = static_cast<uint32_t>(options_.cluster.dsns.size());
  peers.call_ms_max = options_.query_engine.deadline_ms;
  peers_ = std::make_unique<PeerChannels>(std::move(peers), &asked_member_, &counters_, clock_);
  router_ = std::make_unique<RunRouter>(peers_.get(), engine_->runs(), clock_);
  return absl::OkStatus();
}

absl::Status Server::JoinCluster() {
  ClusterOptions cluster = options_.cluster;
  if (cluster.address.empty()) cluster.address = grpc_address_;
  const auto ask = [this](const std::vector<std::string>& servers) { return HoldingsOf(servers, peers_.get()); };
  BW_ASSIGN_OR_RETURN(member_, Members::Open(cluster, owner_name_, engine_->partitions(), &counters_, clock_, ask));
  access_->SetPeers(member_->peer_key(), [member = member_.get()] { return member->DatabaseUnixMillis(); });
  asked_member_ = member_.get();
  // One clock for all servers, whose own may be days apart.
  engine_->StartRetention([member = member_.get()] { return member->DatabaseUnixMillis() * 1'000'000; });
  // Not before the key is there by which the other servers are asked.
  member_->Begin();
  return absl::OkStatus();
}

}  // namespace bellwether::server
