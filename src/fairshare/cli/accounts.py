"""`fairshare org`, `team`, `project`, `limit`, `budget`, `operator`, `audit`: who may use what, and how much of it.

They work on the store that the configuration names. A running gateway follows within a second.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fairshare.cli.check import ConfigOption
from fairshare.cli.storing import listed, show_table, when, with_accounts

if TYPE_CHECKING:
    from fairshare.accounts.rights import Actor
    from fairshare.accounts.service import Accounts

CONFIG = Path("fairshare.yaml")

ModelsOption = Annotated[
    str | None,
    typer.Option("--models", help="Only these models, with commas; of those that the level above may use."),
]
OwnerArgument = Annotated[
    str,
    typer.Argument(
        help="organisation:NAME, team:NAME, project:TEAM/NAME or key:ID.", metavar="OWNER", show_default=False
    ),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]


def register(app: typer.Typer) -> None:
    for group, kind in (("org", "organisation"), ("team", "team"), ("project", "project")):
        _register_nodes(app, group, kind)
    _register_limits(app)
    _register_budgets(app)
    _register_operators(app)
    app.command("import-litellm", epilog="Example: fairshare import-litellm export.json --org lab")(import_litellm)
    app.command("audit", epilog="Example: fairshare audit --last 20")(audit)


# --- tree ---------------------------------------------------------------------------------------------------------


def _register_nodes(app: typer.Typer, group: str, kind: str) -> None:
    commands = typer.Typer(no_args_is_help=True)
    example = "search/web" if kind == "project" else "search" if kind == "team" else "lab"

    def add_team(
        name: NameArgument,
        organisation: Annotated[str, typer.Option("--org", help="The organisation that it belongs to.")],
        config: ConfigOption = CONFIG,
        models: ModelsOption = None,
    ) -> None:
        _add(kind, name, config, models, parent=organisation)

    def add(name: NameArgument, config: ConfigOption = CONFIG, models: ModelsOption = None) -> None:
        _add(kind, name, config, models)

    def change(
        name: NameArgument,
        config: ConfigOption = CONFIG,
        models: ModelsOption = None,
        all_models: Annotated[bool, typer.Option("--all-models", help="All that the level above may use.")] = False,
    ) -> None:
        from fairshare.errors import CallerError

        if (models is None) != all_models:
            raise CallerError("give either --models or --all-models")
        with_accounts(config, lambda accounts, actor: accounts.set_models(actor, kind, name, listed(models)))
        print(f"{kind} {name} is changed.")

    def remove(name: NameArgument, config: ConfigOption = CONFIG) -> None:
        with_accounts(config, lambda accounts, actor: accounts.remove_node(actor, kind, name))
        print(f"{kind} {name} is removed; the account of what it used stays.")

    def show(config: ConfigOption = CONFIG) -> None:
        nodes = with_accounts(config, lambda accounts, actor: accounts.nodes(actor, kind))
        rows = (
            (node.name, node.parent, "all" if node.models is None else ", ".join(node.models), when(node.created_at))
            for node in nodes
        )
        show_table((kind, "of", "models", "since"), rows)

    more = " --org lab" if kind == "team" else ""
    commands.command("add", help=f"Add a {kind}.", epilog=f"Example: fairshare {group} add {example}{more}")(
        add_team if kind == "team" else add
    )
    commands.command(
        "change",
        help=f"Change which models a {kind} may use.",
        epilog=f"Example: fairshare {group} change {example} --models tiny",
    )(change)
    commands.command(
        "remove", help=f"Remove a {kind} with nothing in it.", epilog=f"Example: fairshare {group} remove {example}"
    )(remove)
    commands.command("list", help=f"Show every {kind}.", epilog=f"Example: fairshare {group} list")(show)
    app.add_typer(
        commands,
        name=group,
        help=f"Each {kind} of the store.",
        epilog=f"Example: fairshare {group} add {example}{more}",
    )


def _add(kind: str, name: str, config: Path, models: str | None, parent: str | None = None) -> None:
    with_accounts(
        config,
        lambda accounts, actor: accounts.add_node(actor, kind, name, parent=parent, models=listed(models)),
    )
    print(f"{kind} {name} is added.")


# --- limits -------------------------------------------------------------------------------------------------------


def _register_limits(app: typer.Typer) -> None:
    commands = typer.Typer(no_args_is_help=True)
    commands.command("set", epilog="Example: fairshare limit set team:search --requests-per-minute 600")(set_limit)
    commands.command("list", epilog="Example: fairshare limit list")(list_limits)
    app.add_typer(
        commands,
        name="limit",
        help="Limits of requests and tokens per minute, and of requests in flight.",
        epilog="Example: fairshare limit set team:search --in-flight 64",
    )


def set_limit(
    owner: OwnerArgument,
    config: ConfigOption = CONFIG,
    requests_per_minute: Annotated[
        str | None, typer.Option("--requests-per-minute", help="A number, or none.", metavar="N")
    ] = None,
    tokens_per_minute: Annotated[
        str | None, typer.Option("--tokens-per-minute", help="A number, or none.", metavar="N")
    ] = None,
    in_flight: Annotated[str | None, typer.Option("--in-flight", help="A number, or none.", metavar="N")] = None,
) -> None:
    """Set limits of an owner; `none` takes one away."""
    from fairshare.accounts.kinds import LimitKind
    from fairshare.errors import CallerError

    given = {
        LimitKind.REQUESTS_PER_MINUTE: requests_per_minute,
        LimitKind.TOKENS_PER_MINUTE: tokens_per_minute,
        LimitKind.IN_FLIGHT: in_flight,
    }
    values: dict[LimitKind, int | None] = {}
    for kind, text in given.items():
        if text is not None:
            if text != "none" and not (text.isascii() and text.isdigit() and len(text) <= 15):
                raise CallerError(f"a limit must be a whole number or none, found {text[:40]!r}")
            values[kind] = None if text == "none" else int(text)
    if not values:
        raise CallerError("give at least one of --requests-per-minute, --tokens-per-minute and --in-flight")

    async def work(accounts: "Accounts", actor: "Actor") -> None:
        for kind, value in values.items():
            await accounts.set_limit(actor, owner, kind, value)

    with_accounts(config, work)
    print(f"The limits of {owner} are changed.")


def list_limits(config: ConfigOption = CONFIG) -> None:
    """Show every limit."""
    limits = with_accounts(config, lambda accounts, actor: accounts.limits(actor))
    show_table(("owner", "limit", "value"), ((each.owner, each.kind, each.value) for each in limits))


# --- budgets ------------------------------------------------------------------------------------------------------


def _register_budgets(app: typer.Typer) -> None:
    commands = typer.Typer(no_args_is_help=True)
    commands.command("add", epilog="Example: fairshare budget add team:search --hard 500000 --per month")(add_budget)
    commands.command("increase", epilog="Example: fairshare budget increase 3 --by 100000 --for 7d")(increase_budget)
    commands.command("remove", epilog="Example: fairshare budget remove 3")(remove_budget)
    commands.command("list", epilog="Example: fairshare budget list")(list_budgets)
    app.add_typer(commands, name="budget", help="Budgets in cost units.", epilog="Example: fairshare budget list")


def add_budget(
    owner: OwnerArgument,
    config: ConfigOption = CONFIG,
    hard: Annotated[
        float | None, typer.Option("--hard", help="Beyond it requests are answered 429.", metavar="UNITS")
    ] = None,
    soft: Annotated[float | None, typer.Option("--soft", help="Beyond it the log says so.", metavar="UNITS")] = None,
    borrow_over_soft: Annotated[
        bool, typer.Option("--borrow-over-soft", help="Beyond the soft amount it only borrows.")
    ] = False,
    per: Annotated[
        Literal["day", "week", "month", "total"], typer.Option("--per", help="When it starts again; total: never.")
    ] = "month",
    time_zone: Annotated[str, typer.Option("--time-zone", help="In which days and months are meant.")] = "UTC",
    model: Annotated[str | None, typer.Option("--model", help="Only requests for this model count.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only keys with this tag count.")] = None,
) -> None:
    """Bound what an owner may be charged."""
    from fairshare.accounts.periods import Period

    number = with_accounts(
        config,
        lambda accounts, actor: accounts.add_budget(
            actor,
            owner,
            period=Period(per),
            time_zone=time_zone,
            hard_cost_units=hard,
            soft_cost_units=soft,
            borrow_over_soft=borrow_over_soft,
            model=model,
            tag=tag,
        ),
    )
    print(f"Budget {number} of {owner} is added.")


def increase_budget(
    number: Annotated[int, typer.Argument(metavar="BUDGET", show_default=False)],
    by: Annotated[float, typer.Option("--by", help="How much more.", metavar="UNITS")],
    lasting: Annotated[str, typer.Option("--for", help="For how long, as 7d.", metavar="TIME")],
    config: ConfigOption = CONFIG,
) -> None:
    """Give a budget more for some time; it ends by itself."""
    from fairshare import clock
    from fairshare.accounts import periods

    until = clock.wall() + periods.duration(lasting)
    with_accounts(config, lambda accounts, actor: accounts.increase_budget(actor, number, cost_units=by, until=until))
    print(f"Budget {number} has {by:g} cost units more until {when(until)}.")


def remove_budget(
    number: Annotated[int, typer.Argument(metavar="BUDGET", show_default=False)], config: ConfigOption = CONFIG
) -> None:
    """Take a budget away."""
    with_accounts(config, lambda accounts, actor: accounts.remove_budget(actor, number))
    print(f"Budget {number} is removed.")


def list_budgets(config: ConfigOption = CONFIG) -> None:
    """Show every budget."""
    budgets = with_accounts(config, lambda accounts, actor: accounts.budgets(actor))
    show_table(
        ("budget", "owner", "per", "hard", "soft", "over soft", "model", "tag", "increases"),
        (
            (
                each.id,
                each.owner,
                f"{each.period} ({each.time_zone})",
                each.hard_cost_units,
                each.soft_cost_units,
                "borrows" if each.borrow_over_soft else "",
                each.model,
                each.tag,
                ", ".join(f"{more.cost_units:g} until {when(more.until)}" for more in each.increases),
            )
            for each in budgets
        ),
    )


# --- operators and audit ------------------------------------------------------------------------------------------


def _register_operators(app: typer.Typer) -> None:
    commands = typer.Typer(no_args_is_help=True)
    commands.command("add", epilog="Example: fairshare operator add --role admin --reach organisation:lab")(
        add_operator
    )
    commands.command("revoke", epilog="Example: fairshare operator revoke 3f2a9c417b5e")(revoke_operator)
    commands.command("list", epilog="Example: fairshare operator list")(list_operators)
    app.add_typer(
        commands,
        name="operator",
        help="Keys for the admin API, with roles.",
        epilog="Example: fairshare operator add --role viewer --reach site",
    )


def add_operator(
    role: Annotated[
        Literal["admin", "member", "viewer"],
        typer.Option("--role", help="admin: everything; member: see, and keys; viewer: see."),
    ],
    reach: Annotated[
        str, typer.Option("--reach", help="site, organisation:NAME, team:NAME or project:TEAM/NAME.", metavar="WHERE")
    ],
    note: Annotated[str, typer.Option("--note", help="Whose it is.")] = "",
    config: ConfigOption = CONFIG,
) -> None:
    """Make a key for the admin API, shown once."""
    from fairshare.accounts.rights import Role

    made = with_accounts(
        config, lambda accounts, actor: accounts.add_operator(actor, role=Role(role), reach=reach, note=note)
    )
    print(f"Operator {made.id}. The key, shown this once:\n\n  {made.key}\n")


def revoke_operator(
    operator: Annotated[str, typer.Argument(metavar="OPERATOR", show_default=False)], config: ConfigOption = CONFIG
) -> None:
    """Take a role away."""
    with_accounts(config, lambda accounts, actor: accounts.revoke_operator(actor, operator))
    print(f"Operator {operator} is revoked.")


def list_operators(config: ConfigOption = CONFIG) -> None:
    """Show every operator."""
    operators = with_accounts(config, lambda accounts, actor: accounts.operators(actor))
    show_table(
        ("operator", "role", "reach", "note", "since"),
        ((each.id, each.role, each.reach, each.note, when(each.created_at)) for each in operators),
    )


def audit(
    config: ConfigOption = CONFIG,
    last: Annotated[int, typer.Option("--last", help="How many.", min=1, max=10_000)] = 50,
) -> None:
    """Show the latest changes, newest first: when, who, what, before, after."""
    entries = with_accounts(config, lambda accounts, actor: accounts.audit(actor, limit=last))
    show_table(
        ("when", "who", "what", "of", "before", "after"),
        ((when(each.at), each.actor, each.action, each.target, each.before, each.after) for each in entries),
    )


def import_litellm(
    export: Annotated[
        Path, typer.Argument(help="A JSON object of LiteLLM's tables.", metavar="FILE", show_default=False)
    ],
    organisation: Annotated[str, typer.Option("--org", help="The organisation that gets the teams.")],
    config: ConfigOption = CONFIG,
) -> None:
    """Take over teams, keys and limits from LiteLLM's database; keys go on working as they are.

    Prints one line for each thing that could not be taken over. May be run again: what is there already stays.
    """
    from fairshare import clock
    from fairshare.accounts import litellm
    from fairshare.errors import OperatorError

    try:
        text = export.read_bytes()
    except OSError as error:
        raise OperatorError(f"{export} cannot be read ({(error.strerror or 'unknown').lower()})") from None
    taken = litellm.read(text, now=clock.wall())
    with_accounts(config, lambda accounts, actor: accounts.take_over(actor, taken, organisation=organisation))
    for sentence in taken.left_out:
        print(f"not as it was: {sentence}")
    print(f"{len(taken.teams)} teams and {len(taken.keys)} keys are in the store.")
