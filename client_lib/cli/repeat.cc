// --watch TIME: a command again and again.
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <sstream>
#include <string>

#include "cli/cli.h"
#include "cli/terminal.h"

namespace bellwether::cli {
namespace {

using namespace std::chrono_literals;

// Waits; false: somebody wants it to end.
bool GoOn(const HeldSignals& signals, std::chrono::milliseconds time) {
  pollfd waits{.fd = signals.fd(), .events = POLLIN};
  if (poll(&waits, 1, static_cast<int>(time.count())) <= 0) return true;
  signalfd_siginfo info{};
  if (read(signals.fd(), &info, sizeof info) != sizeof info) return false;
  if (info.ssi_signo == SIGTSTP) kill(getpid(), SIGSTOP);
  return info.ssi_signo == SIGTSTP || info.ssi_signo == SIGWINCH;
}

}  // namespace

void AddWatch(Cli* cli, CLI::App* command) {
  AddTime(command, "--watch", &cli->every, 100ms, 60min, "shows it again after each such time, if it has changed");
}

ExitCode Repeat(Cli* cli) {
  const HeldSignals signals;
  const bool in_place = CanShowPage() && cli->output.format == Format::kTable;
  std::string last;
  do {
    std::ostringstream data, words;
    std::streambuf* const to_stdout = std::cout.rdbuf(data.rdbuf());
    std::streambuf* const to_stderr = std::cerr.rdbuf(words.rdbuf());
    const ExitCode code = cli->action();
    std::cout.rdbuf(to_stdout);
    std::cerr.rdbuf(to_stderr);
    const bool failed = code != kOk && code != kFindings;
    if (failed || data.str() != last) {
      if (in_place && !failed) std::cout << "\x1b[H\x1b[2J";
      std::cout << data.str() << std::flush;
      std::cerr << words.str();
      last = data.str();
    }
    if (failed || !std::cout) return failed ? code : kOk;
  } while (GoOn(signals, cli->every));
  return kOk;
}

}  // namespace bellwether::cli
