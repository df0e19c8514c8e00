#include "cli/terminal.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string_view>
#include <utility>

#include "cli/output.h"

namespace bellwether::cli {
namespace {

sigset_t Held() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGTSTP, SIGWINCH}) sigaddset(&set, number);
  return set;
}

bool WriteAll(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(STDOUT_FILENO, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

}  // namespace

HeldSignals::HeldSignals() {
  const sigset_t held = Held();
  pthread_sigmask(SIG_BLOCK, &held, &before_);
  fd_ = signalfd(-1, &held, SFD_CLOEXEC);
}

HeldSignals::~HeldSignals() {
  close(fd_);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

Screen::Screen(const HeldSignals* signals) : signals_(signals), keys_(tcgetattr(STDIN_FILENO, &before_) == 0) {
  Enter();
}

Screen::~Screen() { Leave(); }

void Screen::Enter() {
  if (keys_) {
    termios raw = before_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);  // ISIG stays: Ctrl-C and Ctrl-Z are signals.
    raw.c_cc[VMIN] = 1;
    raw.c_cc[VTIME] = 0;
    tcsetattr(STDIN_FILENO, TCSANOW, &raw);
  }
  gone_ = !WriteAll("\x1b[?1049h\x1b[?25l\x1b[2J");
  shown_.clear();
}

void Screen::Leave() {
  WriteAll("\x1b[?25h\x1b[?1049l");
  if (keys_) tcsetattr(STDIN_FILENO, TCSADRAIN, &before_);
}

void Screen::Draw(const std::vector<std::string>& lines) {
  // Over what is there, line by line: clearing first would flicker.
  std::string page = "\x1b[H";
  for (size_t i = 0; i < lines.size(); ++i) page += (i == 0 ? "" : "\r\n") + lines[i] + "\x1b[K";
  page += "\x1b[J";
  if (page == shown_) return;
  if (!WriteAll(page)) gone_ = true;
  shown_ = std::move(page);
}

Screen::Event Screen::OnSignal(int number) {
  if (number == SIGWINCH) {
    shown_.clear();
    return Event::kRedraw;
  }
  if (number != SIGTSTP) return Event::kQuit;
  Leave();
  kill(getpid(), SIGSTOP);
  Enter();
  return Event::kRedraw;
}

Screen::Event Screen::Wait(int wake_fd, std::chrono::milliseconds timeout) {
  if (gone_) return Event::kQuit;
  pollfd fds[] = {{.fd = signals_->fd(), .events = POLLIN},
                  {.fd = wake_fd, .events = POLLIN},
                  {.fd = keys_ ? STDIN_FILENO : -1, .events = POLLIN}};
  const int ready = poll(fds, std::size(fds), static_cast<int>(timeout.count()));
  if (ready <= 0) return Event::kTimeout;
  if (fds[0].revents != 0) {
    signalfd_siginfo info{};
    if (read(signals_->fd(), &info, sizeof info) == sizeof info) return OnSignal(static_cast<int>(info.ssi_signo));
  }
  if (fds[2].revents != 0) {
    char key = 0;
    if (read(STDIN_FILENO, &key, 1) != 1 || key == 'q' || key == 'Q') return Event::kQuit;
  }
  if (fds[1].revents != 0) {
    uint64_t count = 0;
    if (read(wake_fd, &count, sizeof count) == sizeof count) return Event::kWoken;
  }
  return Event::kTimeout;
}

bool CanShowPage() {
  const char* const term = std::getenv("TERM");
  return isatty(STDOUT_FILENO) == 1 && TerminalWidth() > 0 && TerminalHeight() > 0 &&
         (term == nullptr || std::string_view(term) != "dumb");
}

size_t TerminalHeight() {
  winsize size{};
  if (isatty(STDOUT_FILENO) != 1 || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return 0;
  return size.ws_row;
}

}  // namespace bellwether::cli
