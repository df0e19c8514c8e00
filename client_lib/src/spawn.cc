#include "client_lib/src/spawn.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

extern char** environ;

namespace bellwether::client {
namespace {

constexpr char kSenderName[] = "bellwether-sender";

std::string LibraryFolder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&LibraryFolder), &info) == 0 || info.dli_fname == nullptr) return "";
  const std::string file = info.dli_fname;
  const size_t slash = file.rfind('/');
  return slash == std::string::npos ? "." : file.substr(0, slash);
}

}  // namespace

std::vector<std::string> SenderCandidates(const std::string& given) {
  if (!given.empty()) return {given};
  std::vector<std::string> candidates;
  if (const std::string folder = LibraryFolder(); !folder.empty()) {
    for (const char* up : {"/", "/../bin/", "/../../bin/"}) candidates.push_back(folder + up + kSenderName);
  }
  const char* path = std::getenv("PATH");
  const std::string folders = path == nullptr ? "/usr/local/bin:/usr/bin" : path;
  for (size_t begin = 0; begin <= folders.size();) {
    const size_t end = std::min(folders.find(':', begin), folders.size());
    if (end > begin) candidates.push_back(folders.substr(begin, end - begin) + "/" + kSenderName);
    begin = end + 1;
  }
  return candidates;
}

std::string FindSender(const std::vector<std::string>& candidates) {
  for (const std::string& candidate : candidates) {
    struct stat info {};
    if (stat(candidate.c_str(), &info) == 0 && S_ISREG(info.st_mode) && access(candidate.c_str(), X_OK) == 0)
      return candidate;
  }
  return "";
}

int SpawnSender(const std::string& path, int fd, int* wait_status) {
  std::vector<char*> environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "LD_", 3) != 0) environment.push_back(*entry);
  }
  environment.push_back(nullptr);
  char name[] = "bellwether-sender";
  char* const arguments[] = {name, nullptr};

  posix_spawnattr_t attributes;
  posix_spawn_file_actions_t actions;
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_init(&actions);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, fd, kSenderMemoryFd);
  posix_spawn_file_actions_addclosefrom_np(&actions, kSenderMemoryFd + 1);
  pid_t first = 0;
  const int error = posix_spawn(&first, path.c_str(), &actions, &attributes, arguments, environment.data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return error;

  *wait_status = 0;
  pid_t waited;
  do {
    waited = waitpid(first, wait_status, 0);
  } while (waited < 0 && errno == EINTR);
  // ECHILD: the trainer ignores SIGCHLD or reaps everything; then the sender's
  // own word in the shared memory has to do.
  return waited < 0 || (WIFEXITED(*wait_status) && WEXITSTATUS(*wait_status) == 0) ? 0 : -1;
}

int OpenPidFd(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

}  // namespace bellwether::client
