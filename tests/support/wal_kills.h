// wal_kills.h: a log whose process is killed again and again while it writes.

#ifndef BELLWETHER_TESTS_SUPPORT_WAL_KILLS_H_
#define BELLWETHER_TESTS_SUPPORT_WAL_KILLS_H_

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <random>

#include "server/store/wal.h"

namespace bellwether::server {

// Twenty times a child opens the log, reports every durable LSN through a pipe
// while `live` uses it, and dies without notice after up to `reports_max`
// reports.  `live` does not return.  Then `check` judges the log by the last
// report, in a child, too: this process must have no thread where it forks.
inline void KillTwenty(const Wal::Options& options, int reports_max, const std::function<void(Wal*)>& live,
                       const std::function<void(Lsn reported)>& check) {
  std::mt19937 random(4711);
  for (int round = 0; round < 20; ++round) {
    int pipe_fds[2];
    ASSERT_EQ(::pipe(pipe_fds), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(pipe_fds[0]);
      auto wal = Wal::Open(options, [fd = pipe_fds[1]](Lsn lsn) {
        if (::write(fd, &lsn, sizeof(lsn)) != sizeof(lsn)) ::_exit(3);
      });
      if (!wal.ok()) ::_exit(2);
      live(wal->get());
      ::_exit(7);
    }
    ::close(pipe_fds[1]);
    Lsn reported = 0, lsn = 0;
    const int reports = 1 + static_cast<int>(random() % static_cast<unsigned>(reports_max));
    for (int i = 0; i < reports && ::read(pipe_fds[0], &lsn, sizeof(lsn)) == sizeof(lsn); ++i) reported = lsn;
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself: " << WEXITSTATUS(status);
    while (::read(pipe_fds[0], &lsn, sizeof(lsn)) == sizeof(lsn)) reported = lsn;
    ::close(pipe_fds[0]);
    const pid_t reader = ::fork();
    if (reader == 0) {
      check(reported);
      std::fflush(nullptr);
      ::_exit(testing::Test::HasFailure() ? 1 : 0);
    }
    ASSERT_EQ(::waitpid(reader, &status, 0), reader);
    ASSERT_TRUE(WIFEXITED(status));
    ASSERT_EQ(WEXITSTATUS(status), 0) << "round " << round;
  }
}

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_WAL_KILLS_H_
