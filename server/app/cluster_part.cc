#include "server/app/cluster_part.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <atomic>
#include <limits>
#include <utility>
#include <vector>

#include "bellwether/v1/query.pb.h"
#include "server/cluster/members.h"
#include "server/cluster/partition_ownership.h"
#include "server/cluster/peer_channels.h"
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

class PostgresCluster final : public ClusterPart {
 public:
  PostgresCluster(Options options, const TlsWatch* tls, Access* access, Counters* counters, Clock* clock)
      : options_(std::move(options)),
        tls_(tls),
        access_(access),
        counters_(counters),
        clock_(clock),
        owner_name_(NewOwnerName(options_.cluster.node)) {}

  void ShareLog(Engine::Options* engine) override {
    PostgresLogOptions log;
    log.owner = owner_name_;
    log.writers = options_.cluster.connections;
    engine->open_shared_log = [log, dsns = options_.cluster.dsns](SharedLog::LaneDurableCallback on_durable) {
      return OpenSpreadLog(dsns, log, std::move(on_durable));
    };
    const auto owner_address = [this](uint32_t partition) {
      Members* const member = asked_member_;
      if (member == nullptr) return std::string();
      member->LookSoon(partition);
      return member->OwnerAddress(partition);
    };
    ownership_ = std::make_unique<PartitionOwnership>(databases(), owner_address);
    engine->ownership = ownership_.get();
  }

  absl::StatusOr<Peers*> StartPeers() override {
    PeerChannels::Options peers;
    BW_ASSIGN_OR_RETURN(peers.credentials, PeerCredentials());
    peers.seal_as_server = [access = access_](const std::string& method) { return access->PassOnAsServer(method); };
    peers.databases = databases();
    peers.call_ms_max = options_.call_ms_max;
    peers_ = std::make_unique<PeerChannels>(std::move(peers), &asked_member_, counters_, clock_);
    return peers_.get();
  }

  absl::Status Join(const std::string& address, Engine* engine) override {
    ClusterOptions cluster = options_.cluster;
    if (cluster.address.empty()) cluster.address = address;
    const auto ask = [this](const std::vector<std::string>& servers) { return HoldingsOf(servers, peers_.get()); };
    BW_ASSIGN_OR_RETURN(member_, Members::Open(cluster, owner_name_, engine->partitions(), counters_, clock_, ask));
    access_->SetPeers(member_->peer_key(), [member = member_.get()] { return member->DatabaseUnixMillis(); });
    asked_member_ = member_.get();
    // One clock for all servers, whose own may be days apart.
    engine->StartRetention([member = member_.get()] { return member->DatabaseUnixMillis() * 1'000'000; });
    // Not before the key is there by which the other servers are asked.
    member_->Begin();
    return absl::OkStatus();
  }

  void Tick() override {
    if (peer_tls_ != nullptr) peer_tls_->Tick();
  }
  void Announce() override {
    if (member_ != nullptr) member_->Announce();
  }
  void Leave() override {
    if (member_ != nullptr) member_->Leave();
  }

 private:
  uint32_t databases() const { return static_cast<uint32_t>(options_.cluster.dsns.size()); }

  absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> PeerCredentials() {
    const TlsFiles& peer = options_.cluster.peer;
    if (tls_ == nullptr) return grpc::InsecureChannelCredentials();
    TlsFiles files = options_.tls;
    files.crl.clear();  // Of those who come in; the others are servers.
    if (!peer.certificate.empty()) {
      files.certificate = peer.certificate;
      files.key = peer.key;
    }
    if (!peer.client_ca.empty()) files.client_ca = peer.client_ca;
    const TlsWatch* shown = tls_;
    if (!peer.certificate.empty() || !peer.client_ca.empty()) {
      BW_ASSIGN_OR_RETURN(peer_tls_, TlsWatch::Open(files, counters_, clock_));
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

  const Options options_;
  const TlsWatch* const tls_;
  Access* const access_;
  Counters* const counters_;
  Clock* const clock_;
  const std::string owner_name_;                   // In the lease table.
  std::unique_ptr<TlsWatch> peer_tls_;             // Null: as tls_.
  std::unique_ptr<PartitionOwnership> ownership_;  // Since ShareLog().
  std::unique_ptr<Members> member_;                // Since Join().
  std::atomic<Members*> asked_member_ = nullptr;   // The same, for calls and streams that come before it.
  std::unique_ptr<PeerChannels> peers_;            // Since StartPeers().
};

}  // namespace

absl::Status CheckClusterBuild(const ClusterOptions&) { return absl::OkStatus(); }

absl::StatusOr<std::unique_ptr<ClusterPart>> ClusterPart::Make(Options options, const TlsWatch* tls, Access* access,
                                                               Counters* counters, Clock* clock) {
  return std::make_unique<PostgresCluster>(std::move(options), tls, access, counters, clock);
}

}  // namespace bellwether::server
