package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/loadgen"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
)

func newBenchMultiturn() *cobra.Command {
	b := &benchFlags{}
	var clients, conversations, workingSet int
	var turns, think string
	var replay serveFlags
	cmd := &cobra.Command{
		Use:   "multiturn --url URL",
		Short: "Hold conversations with a server: each turn's prompt has the real answers before it",
		Long: `Hold conversations: each turn's prompt has all turns and real answers before it, which a
server with a prefix cache finds again. At most --clients requests are in flight. With a
larger --working-set more conversations are open: a client always continues the one that
has waited longest, so the cache must keep them all. --input and --output are for a turn.
--prefix is a system message, shared according to --prefix-groups and --prefix-share.

With --trace, the requests of a Mooncake trace become conversations: a request whose prompt
begins with the blocks of an earlier one is its next turn, sent after its answer. Prompts
share exactly the trace's block ids. Its times are ignored. --block-tokens shrinks its
blocks, and so all its lengths.

The report has a row for each turn. A failed turn ends its conversation, except with --trace.`,
		Example: `  xpyd bench multiturn --url http://127.0.0.1:8000 --clients 64 --turns 10 --conversations 256
  xpyd bench multiturn --url http://127.0.0.1:8000 --clients 8 --working-set 200 --duration 5m --think exp:5s
  xpyd bench multiturn --url http://127.0.0.1:8000 --prefix 2000 --prefix-groups 4 --prefix-share 0.8 --input 100-300 --output 200 --html turns.html
  xpyd bench multiturn --url http://127.0.0.1:8000 --trace conversation_trace.jsonl --block-tokens 64 --max-context 4096 --clients 16 --requests 2000 --json turns.json`,
	}
	b.register(cmd, "chat")
	f := cmd.Flags()
	f.IntVar(&clients, "clients", 16, "most requests in flight")
	f.StringVar(&turns, "turns", "5", "turns of a conversation, a distribution like those of tokens")
	f.IntVar(&conversations, "conversations", 0, "conversations in all (default 4 for each open one, without --duration and --requests)")
	f.IntVar(&workingSet, "working-set", 0, "conversations open at once (default: --clients)")
	f.StringVar(&think, "think", "0s", "time between an answer and the next turn: 2s, 1s-3s, exp:2s, …")
	f.StringVar(&replay.trace, "trace", "", "a Mooncake trace (JSON lines with hash_ids) instead of --turns and lengths")
	f.IntVar(&replay.blockTokens, "block-tokens", workload.BlockTokens, blockTokensHelp)
	f.IntVar(&replay.maxContext, "max-context", 0, "of --trace: leave out requests of more tokens than this")
	f.StringVar(&replay.promptIDs, "prompt-ids", "", promptIDsHelp+"; with --trace")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if replay.trace != "" {
			return multiturnTrace(cmd, b, &replay, clients)
		}
		if replay.promptIDs != "" {
			return usageError{errors.New("--prompt-ids goes with --trace")}
		}
		if workingSet == 0 {
			workingSet = clients
		}
		if conversations == 0 && b.duration == 0 && b.requests == 0 {
			conversations = 4 * workingSet
		}
		if clients < 1 || conversations < 0 || workingSet < clients {
			return usageError{fmt.Errorf("--clients %d, --conversations %d, --working-set %d: want at least 1 client, and no more clients than open conversations", clients, conversations, workingSet)}
		}
		phase := loadgen.Phase{Name: fmt.Sprintf("%d clients", clients), Clients: clients}
		return b.run(cmd, []loadgen.Phase{phase}, func(text *workload.Text) (loadgen.Source, error) {
			shape := workload.TalkShape{Open: workingSet, Total: conversations, Chat: b.endpoint == "chat"}
			var err error
			if shape.Shape, err = b.shape(); err != nil {
				return nil, usageError{err}
			}
			if shape.Turns, err = workload.ParseLengths(turns, 1); err != nil {
				return nil, usageError{fmt.Errorf("--turns: %w", err)}
			}
			if shape.Think, err = workload.ParseTimes(think); err != nil {
				return nil, usageError{fmt.Errorf("--think: %w", err)}
			}
			b.load.Kind, b.load.Turns, b.load.Think, b.load.WorkingSet = "multiturn", turns, think, workingSet
			return workload.NewTalks(text, shape), nil
		})
	}
	return cmd
}

// multiturnTrace holds the conversations of a trace.
func multiturnTrace(cmd *cobra.Command, b *benchFlags, s *serveFlags, clients int) error {
	for _, name := range []string{"turns", "conversations", "working-set", "think", "input", "output", "prefix"} {
		if cmd.Flags().Changed(name) {
			return usageError{fmt.Errorf("--%s does not go with --trace, which says it all", name)}
		}
	}
	if clients < 1 {
		return usageError{fmt.Errorf("--clients %d: want at least 1", clients)}
	}
	if err := s.checkTrace(); err != nil {
		return usageError{err}
	}
	phase := loadgen.Phase{Name: fmt.Sprintf("%d clients", clients), Clients: clients}
	return b.run(cmd, []loadgen.Phase{phase}, func(text *workload.Text) (loadgen.Source, error) {
		if s.promptIDs != "" {
			if err := promptIDs(s.promptIDs, b, text); err != nil {
				return nil, err
			}
		}
		b.load.Kind = "multiturn trace"
		s.speed = 1
		trace, err := s.readTrace(b, text)
		if err != nil {
			return nil, err
		}
		return workload.NewChains(trace), nil
	})
}
