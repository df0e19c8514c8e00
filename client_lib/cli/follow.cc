#include "cli/follow.h"

#include <memory>
#include <random>
#include <string>

#include "src/backoff.h"

namespace bellwether::cli {
namespace {

// A cluster's server may be a moment behind the one that told us last.  One that has
// lost its store stays behind.
constexpr int kBehindMax = 5;

}  // namespace

ExitCode Follow(const ConnectOptions& options, const ReadStream& read) {
  Interrupt interrupt;
  client::Backoff backoff(std::random_device{}());
  bool known = false;  // Something was heard of it.
  int failures = 0;    // In a row.
  int behind = 0;      // Likewise: of a server that was reached.
  for (;;) {
    ExitCode code = kOk;
    std::string why;
    const std::unique_ptr<Connection> connection = TryConnect(options, &code, &why);
    bool come_back = known && code == kUnreachable;
    if (connection != nullptr) {
      grpc::ClientContext context;
      connection->Prepare(&context, /*long_call=*/true);
      interrupt.Watch(&context);
      const StreamEnd end = read(connection.get(), &context, [&] {
        if (failures > 1) Complain(connection->address() + " answers again");
        known = true;
        failures = behind = 0;
        backoff.Reset();
      });
      interrupt.Watch(nullptr);
      if (end.enough || interrupt.happened()) return kOk;
      if (end.again && end.status.ok()) continue;
      code = CodeOf(end.status);
      why = Explain(connection.get(), end.status);
      const grpc::StatusCode error = end.status.error_code();
      come_back = known && (error == grpc::StatusCode::UNAVAILABLE ||
                            error == grpc::StatusCode::RESOURCE_EXHAUSTED ||  // All who watch come at once.
                            (error == grpc::StatusCode::OUT_OF_RANGE && ++behind <= kBehindMax));
    }
    if (code == kOk) return kOk;
    if (!come_back) {
      Complain(why);
      return code;
    }
    if (++failures == 2) Complain(why + "; trying until it answers");
    if (!interrupt.Sleep(backoff.Next())) return kOk;
  }
}

}  // namespace bellwether::cli
