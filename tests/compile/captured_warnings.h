#pragma once
#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace tessera {

// Collects the warnings of this thread while it is alive.
class CapturedWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;

  size_t count(const std::string& text) const {
    size_t n = 0;
    for (const auto& message : messages) n += message.find(text) != std::string::npos;
    return n;
  }

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace tessera
