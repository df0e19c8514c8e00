// command_queue.h: what the server asks, on its way to the trainer.
//
// The trainer polls at its steps, so commands may wait: in the shared ring of
// kCommandSlots, and behind it in a queue of kWaitingMax.  Not thread-safe.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_COMMAND_QUEUE_H_
#define BELLWETHER_CLIENT_LIB_SENDER_COMMAND_QUEUE_H_

#include <deque>
#include <string>

#include "bellwether/v1/ingest.pb.h"
#include "client_lib/src/shared_memory.h"

namespace bellwether::client {

class CommandQueue {
 public:
  static constexpr size_t kWaitingMax = 256;

  explicit CommandQueue(SharedMemory* memory) : memory_(memory), header_(memory->header()) {}

  void PushSampling(const v1::Sampling& sampling);
  // False if the action cannot reach the trainer; `*why` then says so.
  bool PushAction(const v1::Action& action, std::string* why);
  // Moves what waits into the shared ring.
  void Pump();

 private:
  struct Command {
    uint32_t type;
    double value;
    std::string payload;
  };

  SharedMemory* memory_;
  SharedHeader* header_;
  std::deque<Command> waiting_;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_COMMAND_QUEUE_H_
