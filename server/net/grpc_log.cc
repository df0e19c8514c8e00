#include "server/net/grpc_log.h"

#include <grpc/support/log.h>

#include <atomic>
#include <cstdint>

#include "server/util/clock.h"
#include "server/util/log.h"

namespace bellwether::server {
namespace {

constexpr int64_t kBetweenLinesNanos = 1'000'000'000;

std::atomic<int64_t> next_line_ns{INT64_MIN};
std::atomic<uint64_t> left_out{0};

void Say(gpr_log_func_args* said) {
  if (said->severity == GPR_LOG_SEVERITY_DEBUG) return;
  const int64_t now_ns = MonotonicNow();
  int64_t next_ns = next_line_ns.load(std::memory_order_relaxed);
  if (now_ns < next_ns || !next_line_ns.compare_exchange_strong(next_ns, now_ns + kBetweenLinesNanos)) {
    left_out.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  const uint64_t before = left_out.exchange(0);
  if (said->severity == GPR_LOG_SEVERITY_ERROR) {
    LogWarning("gRPC: {} ({} lines were left out before)", said->message, before);
  } else {
    LogInfo("gRPC: {} ({} lines were left out before)", said->message, before);
  }
}

}  // namespace

void TakeGrpcLog() { gpr_set_log_function(&Say); }

}  // namespace bellwether::server
