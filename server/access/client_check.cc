#include "server/access/client_check.h"

#include <functional>
#include <string>

namespace bellwether::server {
namespace {

namespace e = grpc::experimental;

class Check final : public e::ExternalCertificateVerifier {
 public:
  explicit Check(const TlsWatch* watch) : watch_(watch) {}

  bool Verify(e::TlsCustomVerificationCheckRequest* request, std::function<void(grpc::Status)>,
              grpc::Status* sync_status) override {
    const grpc::string_ref own = request->peer_cert(), chain = request->peer_cert_full_chain();
    std::string shown(own.data(), own.size());
    shown.append(chain.data(), chain.size());  // His own may stand in it twice: that is no harm.
    const absl::Status checked = watch_->CheckClient(shown);
    if (!checked.ok()) *sync_status = grpc::Status(grpc::StatusCode::UNAUTHENTICATED, std::string(checked.message()));
    return true;
  }
  void Cancel(e::TlsCustomVerificationCheckRequest*) override {}  // Verify() has answered by then.

 private:
  const TlsWatch* const watch_;
};

}  // namespace

std::shared_ptr<e::CertificateVerifier> ClientCheck(const TlsWatch* watch) {
  return e::ExternalCertificateVerifier::Create<Check>(watch);
}

}  // namespace bellwether::server
