// time_text.h: a span of time in words, the same in an alert and in the command.
//
// A pure function; safe from any thread.

#ifndef BELLWETHER_TIME_TEXT_H_
#define BELLWETHER_TIME_TEXT_H_

#include <algorithm>
#include <cstdio>
#include <string>

namespace bellwether {

// "80 s", "25 min", "1.6 h", "3.2 days"; of what is below 0: "0 s".
inline std::string TimeText(double seconds) {
  constexpr double kMinute = 60, kHour = 3600, kDay = 86400;
  const double span = std::max(seconds, 0.0);
  char text[64];
  if (span < 1.5 * kMinute) {
    std::snprintf(text, sizeof text, "%.0f s", span);
  } else if (span < 1.5 * kHour) {
    std::snprintf(text, sizeof text, "%.0f min", span / kMinute);
  } else if (span < 2 * kDay) {
    std::snprintf(text, sizeof text, "%.1f h", span / kHour);
  } else {
    std::snprintf(text, sizeof text, "%.1f days", span / kDay);
  }
  return text;
}

}  // namespace bellwether

#endif  // BELLWETHER_TIME_TEXT_H_
