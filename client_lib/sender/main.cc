// bellwether-sender: sends what a trainer pushes; started by libbellwether_client.
//
// Takes no arguments: the shared memory is descriptor 3 (spawn.h), and holds
// everything else.  Signals that people and schedulers send to whole groups of
// processes are ignored while the trainer lives: the sender ends by itself soon
// after it.  Behind the trainer's end SIGTERM ends the sending at once.

#include <grpc/support/log.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

#include "client_lib/sender/sender.h"
#include "client_lib/src/shared_memory.h"
#include "client_lib/src/spawn.h"

int main(int argc, char**) {
  using bellwether::client::SharedMemory;
  SharedMemory memory;
  if (argc != 1 || memory.Open(bellwether::client::kSenderMemoryFd) != 0) {
    std::fprintf(stderr, "bellwether-sender %s is started by libbellwether_client of the same version, not by hand\n",
                 BELLWETHER_VERSION);
    return 2;
  }
  // Before anybody is told which process it is.
  for (const int signal : {SIGINT, SIGHUP, SIGPIPE, SIGUSR1, SIGUSR2}) std::signal(signal, SIG_IGN);
  std::signal(SIGTERM, [](int) { bellwether::client::AskToEnd(); });
  // Before any thread exists.  The first process ends, so that the trainer has
  // no child left.
  const pid_t pid = fork();
  if (pid < 0) return 1;
  if (pid > 0) {
    memory.header()->sender_pid.store(static_cast<uint32_t>(pid), std::memory_order_release);
    _exit(0);
  }
  if (memory.header()->config.tls_key[0] != '\0' || memory.header()->config.token_file[0] != '\0')
    prctl(PR_SET_DUMPABLE, 0);
  gpr_set_log_function([](gpr_log_func_args*) {});  // Not into the trainer's stderr.
  bellwether::client::Sender(&memory).Run();
  // Threads of gRPC that linger must not hold the process.
  _exit(0);
}
