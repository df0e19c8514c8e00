// postgres_server.h: a real PostgreSQL in a temporary folder, with the shared
// schema, for one test.
//
// PostgreSQL refuses to run as root.  Started by root it runs as the user
// postgres, or, without such a user, as `nobody`.

#ifndef BELLWETHER_TESTS_SUPPORT_POSTGRES_SERVER_H_
#define BELLWETHER_TESTS_SUPPORT_POSTGRES_SERVER_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "server/cluster/connection.h"

namespace bellwether::server {

class PostgresServer {
 public:
  // Null where PostgreSQL's programs, or libpq, are not: skip then, and say so.
  // Anything else that goes wrong fails the test.
  static std::unique_ptr<PostgresServer> Start();
  ~PostgresServer();
  PostgresServer(const PostgresServer&) = delete;
  PostgresServer& operator=(const PostgresServer&) = delete;

  // Of the role that servers use, and of the schema's owner.
  const std::string& dsn() const { return dsn_; }
  // What the owner is answered; a failure fails the test.
  std::vector<PgResult> Sql(const std::string& statement);
  // The first value of the first row.
  int64_t Number(const std::string& query);
  // Waits until the query answers a number above 0; false: not within a minute.
  bool Await(const std::string& query);
  // A setting, in force from the next statement on; of standbys that are named: from the next commit on.
  void Set(const std::string& name, const std::string& value);

 private:
  PostgresServer() = default;
  // With `input` as standard input, which that user need not be able to open.
  bool Run(const std::string& program, const std::vector<std::string>& words, const std::string& input = "/dev/null");
  // Until a commit waits for standbys that there are not.
  void AwaitStandbysWanted();
  pid_t Spawn(const std::string& program, const std::vector<std::string>& words, const std::string& input) const;

  std::string folder_, programs_, dsn_, owner_dsn_;
  std::vector<std::string> as_user_;  // What to begin a command with.
  pid_t process_ = -1;
  std::unique_ptr<PgConnection> owner_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_POSTGRES_SERVER_H_
