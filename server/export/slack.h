// slack.h: a notification as a message for people's chat.
//
// Slack's incoming webhooks, and those that take the same body (Mattermost,
// Rocket.Chat, Discord under /slack).
//
// https://api.slack.com/reference/messaging/attachments

#ifndef BELLWETHER_SERVER_EXPORT_SLACK_H_
#define BELLWETHER_SERVER_EXPORT_SLACK_H_

#include <nlohmann/json_fwd.hpp>

namespace bellwether::server {

// `notification` is a body of Alertmanager's webhook (webhook.h).  One line for
// the phone's screen, then each alert with what it means and what to do.
nlohmann::json SlackMessage(const nlohmann::json& notification);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_SLACK_H_
