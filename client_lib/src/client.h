// client.h: what is behind a bw_client.
//
// The rules are those of include/bellwether/client.h; client_c.cc has checked
// the pointers.  Every method returns a bw_status and sets the last error.

#ifndef BELLWETHER_CLIENT_LIB_SRC_CLIENT_H_
#define BELLWETHER_CLIENT_LIB_SRC_CLIENT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "bellwether/client.h"
#include "client_lib/src/frame_ring.h"
#include "client_lib/src/shared_memory.h"
#include "client_lib/src/validate.h"

namespace bellwether::client {

// Arguments of bw_client_push_spectrum(), by name.
struct SpectrumArgs {
  int64_t step;
  uint32_t layer, head, kind, n;
  float scale;
  const float* upper;
};

class Client {
 public:
  // REQUIRES: ValidateOptions(options).
  static bw_status Create(const bw_client_options& options, std::unique_ptr<Client>* client);

  // Lets the sender know that nothing more comes.  Waits for nothing.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // False in a child of the process that made the client; sets the error.
  bool BelongsHere() const;

  bw_status Push(const bw_frame& given);
  bw_status PushNames(uint32_t granularity, uint32_t first, uint32_t count, const char* const* names);
  bw_status PushEvent(int64_t step, uint32_t kind, double value, const char* text);
  bw_status PushSpectrum(const SpectrumArgs& spectrum);
  bw_status PushActionResult(const char* id, int64_t step, uint32_t applied, const char* reason);
  bw_status Poll(bw_command* command);
  void GetCounters(bw_counters* counters) const;
  bw_status Flush(uint32_t timeout_ms);

 private:
  Client(std::shared_ptr<SharedMemory> memory, const bw_client_options& options);

  // A slot to fill, or nullptr with `*status` set.
  char* Reserve(bw_status* status);
  bw_status Commit();

  std::shared_ptr<SharedMemory> memory_;
  SharedHeader* header_;
  RingProducer ring_;
  FrameLimits limits_;
  std::string sender_path_;
  uint64_t fork_generation_;
  bool started_ = false;
};

// One more in every child of fork().
uint64_t ForkGeneration();

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SRC_CLIENT_H_
