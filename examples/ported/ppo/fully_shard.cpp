// plain.cpp with fully_shard. It saves a checkpoint every five steps, and continues from the last one on any number of
// ranks. The target network is not sharded: the actors of every rank use it at any time.
//   tessera run -n 4 -- ppo_fully_shard FOLDER [STEPS]
#include <tessera/train.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace ts = tessera;

constexpr int64_t kEnvironments = 8, kSteps = 16;  // per iteration

struct ActorCriticImpl : torch::nn::Module {
  ActorCriticImpl() {
    body = register_module("body", torch::nn::Linear(2, 32));
    actor = register_module("actor", torch::nn::Linear(32, 3));
    critic = register_module("critic", torch::nn::Linear(32, 1));
  }
  // Log probabilities of the actions, and the value, side by side: (batch, 4).
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(body(x));
    return torch::cat({torch::log_softmax(actor(x), -1), critic(x)}, -1);
  }
  torch::nn::Linear body{nullptr}, actor{nullptr}, critic{nullptr};
};
TESSERA_MODULE(ActorCritic);

// Push a cart with force -1, 0 or 1 to the middle. The reward is high there.
struct Rollout {
  torch::Tensor observations = torch::zeros({kSteps, 2}), actions = torch::zeros({kSteps}, torch::kLong);
  torch::Tensor log_probs = torch::zeros({kSteps}), returns = torch::zeros({kSteps});
};
Rollout play(ActorCritic& policy, int64_t environment, int64_t iteration) {
  const torch::NoGradGuard no_grad;
  std::mt19937 random(static_cast<unsigned>(environment + 1000 * iteration));
  std::uniform_real_distribution<double> uniform(0, 1);
  Rollout rollout;
  std::vector<double> rewards;
  double place = 2 * uniform(random) - 1, speed = 0;
  for (int64_t t = 0; t < kSteps; t++) {
    rollout.observations[t] = torch::tensor({place, speed});
    const auto log_probs = policy->forward(rollout.observations[t].unsqueeze(0))[0];
    int64_t action = 0;
    for (double left = uniform(random); action < 2; action++)
      if ((left -= std::exp(log_probs[action].item<double>())) < 0) break;
    speed = 0.9 * speed + 0.1 * static_cast<double>(action - 1);
    place += speed;
    rollout.actions[t] = action;
    rollout.log_probs[t] = log_probs[action];
    rewards.push_back(-place * place);
  }
  double sum = policy->forward(torch::tensor({{place, speed}}, torch::kFloat))[0][3].item<double>();
  for (int64_t t = kSteps - 1; t >= 0; t--) rollout.returns[t] = sum = rewards[static_cast<size_t>(t)] + 0.9 * sum;
  return rollout;
}

torch::Tensor train_step(ActorCritic& model, torch::optim::Optimizer& optimizer, torch::Tensor observations,
                         torch::Tensor actions, torch::Tensor log_probs, torch::Tensor returns) {
  optimizer.zero_grad();
  auto out = model(observations);
  auto value = out.select(1, 3), advantage = returns - value.detach();
  auto ratio = torch::exp(out.gather(1, actions.unsqueeze(1)).squeeze(1) - log_probs);
  auto gain = torch::min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage);
  auto loss = 0.5 * (value - returns).pow(2).mean() - gain.mean();
  loss.backward();
  optimizer.step();
  return loss.detach();
}

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".";
  const int64_t steps = argc > 2 ? std::stoll(argv[2]) : 20;
  ts::init();
  torch::manual_seed(1);
  ActorCritic model;
  ActorCritic target;
  ts::fully_shard(model);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
  std::ofstream log(ts::get_rank() == 0 ? folder + "/losses.txt" : "/dev/null", std::ios::app);
  log.precision(17);
  const int64_t count = kEnvironments / ts::get_world_size(), first = ts::get_rank() * count;
  ts::TrainingState state{model, target, optimizer};
  state.load(folder);
  for (int64_t& step = state.step; step < steps; step++) {
    if (step % 5 == 0) state.save(folder);
    // The actors play with the target network, which follows the model slowly.
    std::vector<Rollout> rollouts(static_cast<size_t>(count));
    std::vector<std::thread> actors;
    for (int64_t i = 0; i < count; i++)
      actors.emplace_back([&, i] { rollouts[static_cast<size_t>(i)] = play(target, first + i, step); });
    for (auto& actor : actors) actor.join();
    std::vector<torch::Tensor> observations, actions, log_probs, returns;
    for (auto& rollout : rollouts) {
      observations.push_back(rollout.observations);
      actions.push_back(rollout.actions);
      log_probs.push_back(rollout.log_probs);
      returns.push_back(rollout.returns);
    }
    torch::Tensor loss;
    for (int epoch = 0; epoch < 3; epoch++)
      loss = train_step(model, optimizer, torch::cat(observations), torch::cat(actions), torch::cat(log_probs),
                        torch::cat(returns));
    log << step << " " << ts::mean_over_ranks(loss).item<double>() << std::endl;
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < target->parameters().size(); i++)
      target->parameters()[i].lerp_(ts::DTensor(model->parameters()[i]).full_tensor(), 0.5);
  }
  ts::destroy();
  return 0;
}
