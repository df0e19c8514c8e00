// absent_peers.h: a cluster of which only this server answers.

#ifndef BELLWETHER_TESTS_SUPPORT_ABSENT_PEERS_H_
#define BELLWETHER_TESTS_SUPPORT_ABSENT_PEERS_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/query/ports/peers.h"

namespace bellwether::server {

class AbsentPeers final : public Peers {
 public:
  // "a:1,b:1" are the others; `unserved` partitions have no server.
  AbsentPeers(const std::string& others, uint32_t unserved) {
    for (size_t at = 0, end = 0; !others.empty() && end != std::string::npos; at = end + 1) {
      end = others.find(',', at);
      spread_.others.push_back(others.substr(at, end == std::string::npos ? end : end - at));
    }
    spread_.unserved = unserved;
  }

  Spread spread() const override { return spread_; }
  std::vector<std::pair<uint32_t, uint64_t>> holdings() const override { return {}; }
  Owner OwnerOf(const RunUuid&) const override { return {.here = true, .address = ""}; }
  Owner OwnerOfRun(RunId) const override { return {.here = true, .address = ""}; }
  absl::StatusOr<std::string> Call(const std::string&, const std::string&, const std::string&, const std::string&,
                                   int64_t) override {
    return absl::UnavailableError("away");
  }
  std::vector<Answer> CallAll(const std::vector<std::string>& servers, const std::string&, const std::string&,
                              const std::string&, int64_t) override {
    std::vector<Answer> answers;
    for (const std::string& server : servers) answers.push_back({server, absl::UnavailableError("away")});
    return answers;
  }
  std::shared_ptr<PeerStream> Stream(const std::string&, const std::string&, const std::string&, const std::string&,
                                     std::function<void(std::string)>,
                                     std::function<void(const absl::Status&)> on_end) override {
    on_end(absl::UnavailableError("away"));
    return nullptr;
  }
  absl::StatusOr<std::shared_ptr<PeerUpload>> Upload(const std::string&, const std::string&,
                                                     const std::string&) override {
    return absl::UnavailableError("away");
  }
  std::string SealAsServer(const std::string&) const override { return ""; }

 private:
  Spread spread_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_ABSENT_PEERS_H_
