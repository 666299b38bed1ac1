package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/loadgen"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
)

// newBenchMultiturn is `xpyd bench multiturn`.
func newBenchMultiturn() *cobra.Command {
	b := &benchFlags{}
	var clients, conversations, workingSet int
	var turns, think string
	cmd := &cobra.Command{
		Use:   "multiturn --url URL",
		Short: "Hold conversations with a server: each turn has the real answers before it",
		Long: `Holds conversations: each turn's prompt has all turns and real answers before
it, so that a server with a prefix cache finds them again. --clients requests are
in flight at most. With a --working-set above that, more conversations are open:
a client always goes on with the one that has waited longest, so the cache must
keep them all. --input and --output are those of a turn. --prefix is a system
message, shared as --prefix-groups and --prefix-share say.

The report has a row a turn. A turn that fails ends its conversation.`,
		Example: `  xpyd bench multiturn --url http://127.0.0.1:8000 --clients 64 --turns 10 --conversations 256
  xpyd bench multiturn --url http://127.0.0.1:8000 --clients 8 --working-set 200 --duration 5m --think exp:5s
  xpyd bench multiturn --url http://127.0.0.1:8000 --prefix 2000 --prefix-groups 4 --prefix-share 0.8 --input 100-300 --output 200 --html turns.html`,
		Args: cobra.NoArgs,
	}
	b.register(cmd, "chat")
	f := cmd.Flags()
	f.IntVar(&clients, "clients", 16, "requests in flight at most")
	f.StringVar(&turns, "turns", "5", "turns of a conversation, a distribution as those of tokens")
	f.IntVar(&conversations, "conversations", 0, "conversations in all (default 4 a client if there is no --duration and --requests)")
	f.IntVar(&workingSet, "working-set", 0, "conversations open at once (default as many as clients)")
	f.StringVar(&think, "think", "0s", "time between an answer and the next turn: 2s, 1s-3s, exp:2s, …")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
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
