#include "tessera/comm/detail/store/authenticated_store.h"

#include "store_test_server.h"
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <functional>
#include <future>
#include <limits>
#include <thread>

namespace tessera::comm::store {
namespace {

double seconds_of(const std::function<void()>& call) {
  const auto began = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - began).count();
}

// The operations of a random sequence. Each returns what the store returned, as text; "error" if it threw.
class StoreOperation {
 public:
  explicit StoreOperation(uint32_t seed) : seed_(seed) {}

  std::string apply(c10d::Store& store) const {
    std::mt19937 random(seed_);
    try {
      return call(store, random);
    } catch (const std::exception&) {
      return "error";
    }
  }

 private:
  static std::string text_key(std::mt19937& random) { return "text" + std::to_string(random() % 5); }
  static std::vector<std::string> text_keys(std::mt19937& random) {
    std::vector<std::string> keys;
    for (size_t i = random() % 4; i > 0; i--) keys.push_back(text_key(random));
    return keys;
  }
  static std::vector<uint8_t> small_value(std::mt19937& random) {  // few values, so that compareSet finds equal ones
    static const std::string kValues[] = {"", "a", std::string("b\0c", 3), "\xff\xfe"};
    return value_of(kValues[random() % 4]);
  }
  static std::string joined(const std::vector<std::vector<uint8_t>>& values) {
    std::string text;
    for (const auto& value : values) text += std::string(value.begin(), value.end()) + "|";
    return text;
  }

  static std::string call(c10d::Store& store, std::mt19937& random) {
    const std::string key = text_key(random), counter = "counter" + std::to_string(random() % 3);
    const auto keys = text_keys(random);
    switch (random() % 12) {
      case 0:
        return store.set(key, small_value(random)), "set";
      case 1: {
        const auto expected = small_value(random), desired = small_value(random);
        return joined({store.compareSet(key, expected, desired)});
      }
      case 2:
        return joined({store.get(key)});
      case 3:
        return std::to_string(store.add(counter, static_cast<int64_t>(random() % 1000) - 500));
      case 4:
        return std::to_string(store.deleteKey(random() % 4 ? key : counter));
      case 5:
        return std::to_string(store.check(keys));
      case 6:
        return store.wait(keys, 1ms), "waited";
      case 7:
        return std::to_string(store.getNumKeys());
      case 8:
        return store.append(key, small_value(random)), "appended";
      case 9:
        return joined(store.multiGet(keys));
      case 10: {
        std::vector<std::vector<uint8_t>> values;
        for (size_t i = 0; i < keys.size(); i++) values.push_back(small_value(random));
        return store.multiSet(keys, values), "set";
      }
      default:
        return joined({store.get(counter)});
    }
  }

  uint32_t seed_;
};

TEST(AuthenticatedStore, RandomSequencesGiveWhatHashStoreGives) {
  size_t errors = 0;
  for (uint32_t sequence = 0; sequence < 60; sequence++) {
    const TestServer server;
    const auto actual = server.client();
    actual->setTimeout(1ms);  // of get and multiGet
    c10d::HashStore expected;
    expected.setTimeout(1ms);
    for (uint32_t step = 0; step < 80; step++) {
      const StoreOperation operation(sequence * 1000 + step);
      const std::string result = operation.apply(expected);
      errors += result == "error";
      ASSERT_EQ(operation.apply(*actual), result) << "sequence " << sequence << ", step " << step;
    }
  }
  EXPECT_GT(errors, 100u);  // time-outs are compared too
}

TEST(AuthenticatedStore, EightThreadsWithOneClientEachAndWithASharedOne) {
  const TestServer server;
  const auto shared = server.client();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 8; rank++)
    threads.emplace_back([&, rank] {
      const auto own = server.client();
      for (int round = 0; round < 50; round++) {
        const auto key = [&](int r) { return c10::str("round", round, "/rank", r); };
        own->set(key(rank), std::vector<uint8_t>{static_cast<uint8_t>(rank), static_cast<uint8_t>(round)});
        auto& store = round % 2 ? *own : *shared;  // all threads wait on one object every second round
        const auto value = store.get(key((rank + 1) % 8));
        EXPECT_EQ(value, (std::vector<uint8_t>{static_cast<uint8_t>((rank + 1) % 8), static_cast<uint8_t>(round)}));
        store.add("count", 1);
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(shared->add("count", 0), 400);
  EXPECT_EQ(shared->getNumKeys(), 401);
}

TEST(AuthenticatedStore, AWaitDelaysNeitherOtherClientsNorOtherThreadsOfTheSameClient) {
  const TestServer server;
  const auto store = server.client();
  auto waiting = std::async(std::launch::async, [&] { store->wait({"first", "second"}); });
  auto reading = std::async(std::launch::async, [&] { return store->multiGet({"second", "first"}); });
  for (int i = 0; i < 200; i++) store->add("other", 1);
  store->set("second", value_of("2"));
  EXPECT_EQ(waiting.wait_for(20ms), std::future_status::timeout);
  server.client()->set("first", value_of("1"));
  waiting.get();
  EXPECT_EQ(reading.get(), (std::vector<std::vector<uint8_t>>{value_of("2"), value_of("1")}));
}

TEST(AuthenticatedStore, ATimeOutNamesTheKeyAndTheServerAndKeepsTheStoreUsable) {
  const TestServer server;
  const auto store = server.client(50ms);
  store->set("a", value_of("1"));
  const std::string where_text = to_text(server.address);
  const char* const where = where_text.c_str();
  const double waited = seconds_of([&] {
    EXPECT_ERROR(CommError, store->wait({"a", "b"}, 100ms), "waited 0.1 s for key 'b'", where, "2 keys");
  });
  EXPECT_GE(waited, 0.1);
  EXPECT_LT(waited, 1.5);
  EXPECT_ERROR(CommError, store->get("c"), "get of key 'c'", "waited 0.05 s", "no rank has set", where);
  EXPECT_ERROR(CommError, store->multiGet({"a", "d"}), "for key 'd'");
  for (const int64_t negative : {int64_t{-1}, std::numeric_limits<int64_t>::min()})
    EXPECT_ERROR(CommError, store->wait({"e"}, std::chrono::milliseconds(negative)), "for key 'e'");
  EXPECT_EQ(store->get("a"), value_of("1"));
}

TEST(AuthenticatedStore, AServerThatStopsEndsAllWaits) {
  TestServer server;
  std::vector<std::future<void>> waits;
  for (int i = 0; i < 4; i++)
    waits.push_back(std::async(std::launch::async, [store = server.client()] {
      EXPECT_ERROR(CommError, store->wait({"never"}, 60s), "wait of key 'never'", "closed the connection",
                   "has stopped");
      EXPECT_ERROR(CommError, store->set("key", value_of("")), "set of key 'key'", "is gone");
    }));
  const auto observer = server.client();
  observer->add("joined", 1);
  EXPECT_EQ(waits[0].wait_for(50ms), std::future_status::timeout);
  const double seconds = seconds_of([&] {
    server.server.reset();
    for (auto& wait : waits) wait.get();
  });
  EXPECT_LT(seconds, 2.0);
  const std::string where = to_text(server.address);
  EXPECT_ERROR(CommError, observer->check({"joined"}), "check of key 'joined'", where.c_str());
}

TEST(AuthenticatedStore, KeysAndValuesOfAMebibyteAndTheLimit) {
  const TestServer server;
  const auto store = server.client();
  std::mt19937 random(4);
  std::string key(1 << 20, 'k'), value(1 << 20, '\0');
  for (char& byte : value) byte = static_cast<char>(random());
  store->set(key, value_of(value));
  EXPECT_EQ(server.client()->get(key), value_of(value));
  EXPECT_ERROR(CommError, store->wait({key + "x"}, 1ms), "'kkkk", "...' (1048577 bytes)");
  EXPECT_ERROR(UsageError, store->set("big", std::vector<uint8_t>(kMaxBodyBytes)), "set of key 'big'", "Split it");
  EXPECT_ERROR(UsageError, store->multiSet({"a", "b"}, {2, std::vector<uint8_t>(kMaxBodyBytes / 2)}), "2 keys");
  store->set("copy", value_of(value));
  EXPECT_ERROR(UsageError, store->multiGet(std::vector<std::string>(64, "copy")), "Ask for fewer keys");
  EXPECT_EQ(store->multiGet(std::vector<std::string>(3, "copy")).at(2), value_of(value));
}

TEST(AuthenticatedStore, RefusedRequestsSayWhy) {
  const TestServer server;
  const auto store = server.client();
  store->set("text", value_of("12 ranks"));
  EXPECT_ERROR(UsageError, store->add("text", 1), "add of key 'text'", "is not a number");
  store->set("large", value_of("9223372036854775807"));
  EXPECT_ERROR(UsageError, store->add("large", 1), "does not fit into 64 bits");
  EXPECT_ERROR(UsageError, store->multiSet({"a", "b"}, {value_of("1")}), "2 keys and 1 values");
  EXPECT_EQ(store->getNumKeys(), 2);
}

}  // namespace
}  // namespace tessera::comm::store
