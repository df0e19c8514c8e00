// terminal.h: the terminal as a page that is drawn again and again.
//
// Plain control sequences that every terminal of the last decades knows; no
// database of terminals has to be there.

#ifndef BELLWETHER_CLI_TERMINAL_H_
#define BELLWETHER_CLI_TERMINAL_H_

#include <signal.h>
#include <termios.h>

#include <chrono>
#include <string>
#include <vector>

namespace bellwether::cli {

// While it lives, the signals that end, stop or resize a program wait for
// Screen::Wait() instead.  Make it before the first Connect(): threads inherit
// the mask.
class HeldSignals {
 public:
  HeldSignals();
  ~HeldSignals();
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  int fd() const { return fd_; }

 private:
  sigset_t before_;
  int fd_;
};

// While it lives: the alternate screen, no cursor, keys unechoed.  Afterwards
// everything is as before.
class Screen {
 public:
  // `signals` must outlive it.
  explicit Screen(const HeldSignals* signals);
  ~Screen();
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  // Writes nothing if it shows that already.
  void Draw(const std::vector<std::string>& lines);

  enum class Event {
    kTimeout,
    kRedraw,  // Another size, or back from Ctrl-Z.
    kWoken,   // `wake_fd` was written to.
    kQuit,    // q, Ctrl-C, SIGTERM, or the terminal is gone.
  };
  // `wake_fd`: an eventfd, read here.
  Event Wait(int wake_fd, std::chrono::milliseconds timeout);

 private:
  void Enter();
  void Leave();
  Event OnSignal(int number);

  const HeldSignals* const signals_;
  termios before_{};
  const bool keys_;  // stdin is a terminal; `before_` is how it was.
  bool gone_ = false;
  std::string shown_;
};

// A terminal that can show a page: not dumb, and of a known size.
bool CanShowPage();
size_t TerminalHeight();

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_TERMINAL_H_
