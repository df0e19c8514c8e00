// alert_json.h: an alert as Alertmanager's JSON.
//
// Labels are the alert's present state (alertname, run, rule, severity, layer,
// head) and change when it grows worse; an imported run has the label imported.  The fingerprint stays the same while
// the alert lives, so that a receiver can match resolved to firing.
// Annotations carry what a person reads.

#ifndef BELLWETHER_SERVER_EXPORT_ALERT_JSON_H_
#define BELLWETHER_SERVER_EXPORT_ALERT_JSON_H_

#include <map>
#include <string>

#include "server/model/alert_transition.h"

namespace bellwether::server {

using StringMap = std::map<std::string, std::string>;

const char* SeverityName(Severity severity);
// BellwetherDriftGrowing for "drift"; BellwetherAlert for a rule of the user's.
std::string AlertName(const std::string& rule);

// `imported`: of a recording that was imported, here and below.
StringMap AlertLabels(const AlertTransition& transition, bool imported);
// Where a person is led to from an alert.
struct AlertLinks {
  std::string page;      // Of the server; "" = none.
  std::string runbooks;  // See RunbookUrl().
};
// What a person reads: `summary` is the sentence with its severity, `description` what to do and why.
StringMap AlertAnnotations(const AlertTransition& transition, const AlertLinks& links, bool imported);
// Stands before the sentence of an alert of an imported run.
inline constexpr char kImportedMark[] = "(imported) ";
// The alert on the run's page; "" without a page.
std::string AlertUrl(const AlertTransition& transition, const std::string& page);
// `base`/name in small letters, or `base` with {name} replaced by it; "" without a base.
std::string RunbookUrl(const std::string& alert_name, const std::string& base);
// The base of the runbooks that the page itself has; "" without a page.
std::string RunbooksOfPage(const std::string& page);
// 16 hexadecimal digits of run and key.
std::string AlertFingerprint(const AlertTransition& transition);
// RFC 3339 in UTC with milliseconds.
std::string FormatTime(int64_t unix_ns);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_ALERT_JSON_H_
